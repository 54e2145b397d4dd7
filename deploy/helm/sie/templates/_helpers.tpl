{{- define "sie.name" -}}
{{ .Release.Name | trunc 52 | trimSuffix "-" }}
{{- end }}

{{- define "sie.selector" -}}
app.kubernetes.io/name: sie
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{- define "sie.labels" -}}
{{ include "sie.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
{{- end }}

{{- define "sie.probe" -}}
httpGet:
  path: {{ .path }}
  port: http
  scheme: {{ ternary "HTTPS" "HTTP" (ne .values.tlsSecret "") }}
{{- end }}
