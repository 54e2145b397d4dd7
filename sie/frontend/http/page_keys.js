// ---- API keys: this tab keeps one for each scope until it is closed.
const keyItem = (scope) => "sie-api-key-" + scope;
/** Return the known keys: that of this scope first, then those of other scopes, because a key may have several. */
const keysFor = (scope) => [...new Set([scope, "infer", "metrics", "admin"].map((each) => sessionStorage.getItem(keyItem(each))).filter(Boolean))];
const keepKey = (scope, text) => sessionStorage.setItem(keyItem(scope), text.replace(/[^!-~]/g, ""));  // a header takes no other characters
/** Send a request with the first key that is not refused, or else return the first refusal. A refused key is kept. */
async function fetchAs(scope, path, options = {}) {
  let refused;
  for (const key of keysFor(scope).concat("")) {
    if (!key && refused) break;
    const response = await fetch(path, { ...options, headers: key ? { ...options.headers, authorization: "Bearer " + key } : options.headers });
    if (response.status !== 401 && response.status !== 403) {
      if (key) keepKey(scope, key);
      return response;
    }
    refused ??= response;
  }
  return refused;
}
