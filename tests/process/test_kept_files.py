"""Files, skills and sessions with the unmodified openai and anthropic clients: forms, statuses, owners, and the disk."""

from __future__ import annotations

import base64
import io
import resource
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import httpx
import openai
import psutil
import pytest

from tests.process.harness import WAIT_S, Server, eventually, start_server
from tests.process.keys import BOTH, INFER, METRICS, bearer, write_keys
from tests.process.wire import connect as connect_raw
from tests.process.wire import raw_request, send_raw

BLOBS = "state/blobs"
FRONT = b"---\nname: My skill\ndescription: does things\n---\n"
HELLO: Any = [{"role": "user", "content": "hello"}]


@pytest.fixture(scope="module")
def state(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kept")


@pytest.fixture(scope="module")
def server(state: Path) -> Iterator[Server]:
    with start_server(
        "--model", "m=stub:generate,max_tokens=8192", "--model", "slow=stub:generate,latency_ms=30",
        "--default-model", "m", "--frontends", "2",
        "--state-dir", str(state / "state"), "--api-keys", str(write_keys(state / "keys.toml")),
        "--max-file-bytes", "33554432", "--max-inline-file-bytes", "100", "--max-preview-chars", "40",
        "--max-skill-bytes", "100000", "--max-skill-files", "10",
    ) as running:  # fmt: skip
        yield running


def connect(server: Server, key: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def alice(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server, INFER) as made:
        yield made


@pytest.fixture(scope="module")
def bob(server: Server) -> Iterator[openai.OpenAI]:
    with connect(server, BOTH) as made:
        yield made


@pytest.fixture(scope="module")
def claude(server: Server) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=server.url, api_key=INFER, max_retries=0) as made:
        yield made


@pytest.fixture(scope="module")
def http(server: Server) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, headers=bearer(INFER), timeout=WAIT_S) as made:
        yield made


def upload(client: openai.OpenAI, data: bytes = b"x,y\n1,2\n", name: str = "a.csv") -> Any:
    return client.files.create(file=(name, data), purpose="user_data")


# --- files ------------------------------------------------------------------------------------------------------------


def test_file_is_uploaded_listed_read_and_deleted(alice: openai.OpenAI) -> None:
    made = alice.files.create(file=("d/../report ü.CSV", b"x,y\n"), purpose="user_data")
    assert (made.filename, made.bytes, made.purpose, made.status, made.object) == (
        "report ü.CSV", 4, "user_data", "processed", "file",
    )  # fmt: skip
    assert made.expires_at == made.created_at + 1800
    extras: Any = made.model_extra
    assert (extras["format"], extras["mime_type"], extras["source"]["tool"]) == ("csv", "text/csv", "user_upload")
    assert alice.files.retrieve(made.id) == made
    assert made.id in [one.id for one in alice.files.list(limit=1)], "the client reads page after page"
    assert [one.id for one in alice.files.list(purpose="no such")] == []
    content = alice.files.content(made.id)
    assert content.read() == b"x,y\n"
    headers = content.response.headers
    assert (headers["content-type"], headers["content-length"]) == ("text/csv", "4")
    assert headers["content-disposition"] == "inline; filename=\"report _.CSV\"; filename*=UTF-8''report%20%C3%BC.CSV"
    assert "sandbox" in headers["content-security-policy"]
    assert alice.files.delete(made.id).deleted
    for look in (alice.files.retrieve, alice.files.content, alice.files.delete):
        with pytest.raises(openai.NotFoundError) as caught:
            look(made.id)
        assert (caught.value.code, caught.value.type) == ("file_not_found", "invalid_request_error")


def test_containers_show_the_same_files(alice: openai.OpenAI) -> None:
    made = upload(alice)
    files = alice.containers.files
    found = files.retrieve(made.id, container_id="cntr_resp_1")
    assert (found.id, found.container_id, found.object, found.source) == (
        made.id, "cntr_resp_1", "container.file", "user",
    )  # fmt: skip
    assert made.id in [one.id for one in files.list("cntr_resp_1")]
    assert files.content.retrieve(made.id, container_id="x").read() == b"x,y\n1,2\n"
    with pytest.raises(openai.NotFoundError):
        files.retrieve("file-none", container_id="x")


def test_anthropic_s_client_sees_its_own_forms(claude: anthropic.Anthropic) -> None:
    files = claude.beta.files
    made = files.upload(file=("n.txt", b"hello"), expires_in_seconds=3600)
    assert (made.type, made.filename, made.mime_type, made.size_bytes) == ("file", "n.txt", "text/plain", 5)
    assert made.expires_at is not None
    assert (made.expires_at - made.created_at).total_seconds() == 1800, "the server keeps no longer than it does"
    assert files.retrieve_metadata(made.id) == made
    assert made in list(files.list(limit=1))
    assert [one.id for one in files.list(ids=[made.id, "file-none"])] == [made.id]
    assert files.download(made.id).read() == b"hello"
    assert files.delete(made.id).type == "file_deleted"
    with pytest.raises(anthropic.NotFoundError) as caught:
        files.delete(made.id)
    body: Any = caught.value.body
    assert (body["type"], body["error"]["type"]) == ("error", "not_found_error")


def test_nothing_exists_for_another_key(
    server: Server, alice: openai.OpenAI, bob: openai.OpenAI, http: httpx.Client
) -> None:
    """The answers are those of ids that never were, to the letter."""
    made = upload(alice)
    skill = alice.skills.create(files=[("s/SKILL.md", FRONT)])
    http.put("/v1/sessions/secret", json={"messages": HELLO}).raise_for_status()
    assert made.id not in [one.id for one in bob.files.list()]
    assert skill.id not in [one.id for one in bob.skills.list()]
    with httpx.Client(base_url=server.url, headers=bearer(BOTH), timeout=WAIT_S) as other:
        for method, path in (
            ("GET", f"/v1/files/{made.id}"), ("GET", f"/v1/files/{made.id}/content"), ("DELETE", f"/v1/files/{made.id}"),
            ("GET", f"/v1/containers/c/files/{made.id}"), ("GET", f"/v1/containers/c/files/{made.id}/content"),
            ("GET", f"/v1/skills/{skill.id}"), ("GET", f"/v1/skills/{skill.id}/content"), ("DELETE", f"/v1/skills/{skill.id}"),
            ("GET", f"/v1/skills/{skill.id}/versions"), ("GET", f"/v1/skills/{skill.id}/versions/1"),
            ("GET", "/v1/sessions/secret"),
        ):  # fmt: skip
            unknown = (
                path.replace(made.id, "f" * len(made.id))
                .replace(skill.id, "s" * len(skill.id))
                .replace("secret", "nobody")
            )
            mine, none = other.request(method, path), other.request(method, unknown)
            assert (mine.status_code, none.status_code) == (404, 404), path
            names = (made.id, skill.id, "secret"), ("f" * len(made.id), "s" * len(skill.id), "nobody")
            assert _without(mine.text, names[0]) == _without(none.text, names[1])
        assert other.delete("/v1/sessions/secret").status_code == 200
        part = {"type": "file", "file": {"file_id": made.id}}
        refused = other.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": [part]}]})
        assert (refused.status_code, refused.json()["error"]["code"]) == (404, "file_not_found")
    assert http.get("/v1/sessions/secret").status_code == 200
    assert alice.files.content(made.id).read() == b"x,y\n1,2\n"
    with httpx.Client(base_url=server.url, headers=bearer(METRICS), timeout=WAIT_S) as watcher:
        assert watcher.get("/v1/files").status_code == 403


def _without(text: str, names: tuple[str, ...]) -> str:
    for name in names:
        text = text.replace(name, "ID")
    return text


@pytest.mark.parametrize(
    ("files", "data", "status", "param"),
    [
        ({}, {"purpose": "x", "y": "z"}, 400, "file"),
        ({"file": ("", b"x")}, {"purpose": "x"}, 400, "file"),
        ({"other": ("a", b"x")}, {"purpose": "x"}, 400, "file"),
        ({"file": ("a", b"x")}, {}, 400, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "x" * 65}, 400, "purpose"),
        ({"file": ("a", b"x")}, {"purpose": "x", "expires_after[seconds]": "9999"}, 400, "expires_after.anchor"),
        ({"file": ("a", b"x")}, {"purpose": "x", "expires_after[anchor]": "created_at", "expires_after[seconds]": "9"}, 400,
         "expires_after.seconds"),
    ],
)  # fmt: skip
def test_wrong_upload_hears_its_field(
    http: httpx.Client, state: Path, files: Any, data: Any, status: int, param: str
) -> None:
    before = blobs(state)
    # A form of values alone is one only if some part is a file.
    answer = http.post("/v1/files", files=files or [("purpose", (None, "x"))], data=data)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert_no_more(state, before)


def test_body_that_is_no_form_is_refused(http: httpx.Client) -> None:
    assert http.post("/v1/files", json={}).status_code == 415
    answer = http.post("/v1/files", content=b"x", headers={"content-type": "multipart/form-data; boundary=q"})
    assert answer.status_code == 400


@pytest.mark.parametrize("query", ["limit=0", "limit=x", "order=up", "after=file-none", "limit=99999"])
def test_wrong_query_hears_its_field(http: httpx.Client, query: str) -> None:
    answer = http.get(f"/v1/files?{query}")
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, query.partition("=")[0])


def blobs(state: Path) -> set[str]:
    folder = state / BLOBS
    return {path.name for path in folder.iterdir()} if folder.exists() else set()


def assert_no_more(state: Path, before: set[str]) -> None:
    eventually(lambda: blobs(state) <= before, "nothing is left of what was refused")


@pytest.mark.timing(forks=True)
def test_large_upload_is_never_in_memory(server: Server, alice: openai.OpenAI) -> None:
    upload(alice)
    before_bytes = {pid: psutil.Process(pid).memory_info().rss for pid in server.frontends()}
    data = b"\xff" * (32 << 20)
    for _ in range(2):  # each frontend may get one
        made = upload(alice, data, "large.bin")
    assert made.bytes == len(data)
    grown = max(psutil.Process(pid).memory_info().rss - before for pid, before in before_bytes.items())
    assert grown < 24 << 20, f"a frontend grew by {grown >> 20} MiB for an upload of 32"
    assert alice.files.content(made.id).read() == data


def test_upload_over_the_limit_leaves_nothing(alice: openai.OpenAI, state: Path) -> None:
    kept = blobs(state)
    with pytest.raises(openai.APIStatusError, match="max_file_bytes") as caught:
        upload(alice, b"x" * ((32 << 20) + 1))
    assert caught.value.status_code == 413
    assert_no_more(state, kept)


def test_upload_that_is_cut_leaves_nothing(server: Server, state: Path) -> None:
    before = blobs(state)
    head = b'--q\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + b"x" * 400_000
    fields = {**bearer(INFER), "content-type": "multipart/form-data; boundary=q", "content-length": "900000"}
    with connect_raw(server.port) as sock:
        sock.sendall(raw_request("/v1/files", headers=fields, length=False) + head)
        eventually(lambda: blobs(state) != before, "the upload is under way")
    eventually(lambda: blobs(state) == before, "nothing is left of it")


@pytest.mark.parametrize(
    "path",
    ["/v1/files/..%2f..%2fetc%2fpasswd/content", "/v1/files/../../etc/passwd", "/v1/files/%00/content", "/v1/files//content",
     "/v1/containers/../files/../../x/content", "/v1/skills/..%2f/content", "/v1/skills/x/versions/..%2f1/content",
     "/v1/sessions/..%2fx"],
)  # fmt: skip
def test_id_never_becomes_a_path(server: Server, path: str) -> None:
    assert send_raw(server.port, raw_request(path, headers=bearer(INFER), method="GET")).status == 404


# --- files in requests ------------------------------------------------------------------------------------------------


def file_part(**ref: str) -> Any:
    return {"type": "file", "file": ref}


def ask(client: openai.OpenAI, *parts: Any, **extra: Any) -> Any:
    messages: Any = [{"role": "user", "content": [{"type": "text", "text": "look"}, *parts]}]
    return client.chat.completions.create(model="m", messages=messages, **extra)


def test_model_reads_the_beginning_of_its_files(alice: openai.OpenAI) -> None:
    made = upload(alice, b"first line\n" + b"y" * 100, "long.txt")
    data = "data:text/plain;base64," + base64.b64encode("grüße".encode()).decode()
    said = ask(alice, file_part(file_id=made.id), file_part(filename="n.md", file_data=data)).choices[0].message.content
    assert said.startswith("system: The user attached these files:")
    assert f"[{made.id}] long.txt (text/plain, 111 bytes)" in said
    assert f"The first 40 characters of its text:\nfirst line\n{'y' * 29}\n[The rest of long.txt is not shown.]" in said
    assert "grüße" in said
    assert data.rpartition(",")[2] not in said, "base64 never reaches the model"
    assert said.endswith("user: look\nassistant: ")


def test_file_of_a_request_is_kept_once_however_often_it_comes(alice: openai.OpenAI) -> None:
    data = base64.b64encode(b"kept once").decode()
    said = {ask(alice, file_part(filename="once.txt", file_data=data)).choices[0].message.content for _ in range(3)}
    assert len(said) == 1, "the prompt is the same, so its beginning is in the prefix cache"
    (found,) = [one for one in alice.files.list() if one.filename == "once.txt"]
    assert found.model_dump()["source"]["tool"] == "input_file"
    assert alice.files.content(found.id).read() == b"kept once"


def test_responses_take_files_and_later_ones_know_them(alice: openai.OpenAI) -> None:
    data = base64.b64encode(b"of a response").decode()
    parts: Any = [{"type": "input_text", "text": "see"}, {"type": "input_file", "filename": "r.txt", "file_data": data}]
    first = alice.responses.create(model="m", input=[{"role": "user", "content": parts}])
    assert "of a response" in first.output_text
    (item,) = alice.responses.input_items.list(first.id).data
    shown = item.model_dump()["content"][1]
    assert (shown["filename"], shown["file_data"]) == ("r.txt", None), "the stored item names the kept file"
    second = alice.responses.create(model="m", input="and?", previous_response_id=first.id)
    assert "r.txt (text/plain, 13 bytes)" in second.output_text
    counted = alice.responses.input_tokens.count(model="m", input="and?", previous_response_id=first.id)
    assert second.usage is not None
    assert counted.input_tokens == second.usage.input_tokens
    alice.files.delete(shown["file_id"])
    third = alice.responses.create(model="m", input="and?", previous_response_id=first.id)
    assert f"[{shown['file_id']}] is no longer available." in third.output_text


@pytest.mark.parametrize(
    ("ref", "param", "words"),
    [
        ({"file_id": "file-none"}, "file_id", "not found"),
        ({"filename": "p.png", "file_data": "iVBORw0KGgo="}, "file_data", "text files"),
        ({"filename": "p.txt", "file_data": "?!"}, "file_data", "base64"),
        ({"file_url": "https://example.com/"}, "file_url", "not served"),
        ({}, "", "file_id"),
        ({"file_id": "file-1", "file_data": "eA=="}, "", "one of"),
    ],
)
def test_file_that_cannot_be_read_is_refused_by_name(alice: openai.OpenAI, ref: Any, param: str, words: str) -> None:
    with pytest.raises(openai.APIStatusError, match=words) as caught:
        ask(alice, file_part(**ref))
    path = f"messages[0].content[1].file{f'.{param}' if param else ''}"
    assert (caught.value.param, caught.value.status_code) == (path, 404 if ref.get("file_id") == "file-none" else 400)


def test_file_by_url_needs_its_setting(http: httpx.Client) -> None:
    part = {"type": "input_file", "file_url": "http://127.0.0.1/"}
    answer = http.post("/v1/responses", json={"input": [{"role": "user", "content": [part]}]})
    assert answer.status_code == 400
    assert "file_urls" in answer.json()["error"]["message"]


# --- skills -----------------------------------------------------------------------------------------------------------


def zipped(name: str = "My skill") -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w") as archive:
        archive.writestr("s/SKILL.md", FRONT.replace(b"My skill", name.encode()))
        archive.writestr("s/scripts/run.py", "print(1)")
    return made.getvalue()


def test_skill_has_versions_and_an_archive(alice: openai.OpenAI) -> None:
    made = alice.skills.create(files=("s.zip", zipped()))
    assert (made.name, made.description, made.latest_version, made.default_version, made.object) == (
        "My skill", "does things", "1", "1", "skill",
    )  # fmt: skip
    second = alice.skills.versions.create(made.id, files=[("s/SKILL.md", FRONT.replace(b"My", b"Your")), ("s/x", b"1")])
    assert (second.version, second.name, second.skill_id) == ("2", "Your skill", made.id)
    assert alice.skills.retrieve(made.id).latest_version == "2"
    assert alice.skills.update(made.id, default_version="1").name == "My skill"
    assert [one.version for one in alice.skills.versions.list(made.id, limit=1)] == ["1", "2"]
    with zipfile.ZipFile(io.BytesIO(alice.skills.content.retrieve(made.id).read())) as archive:
        assert archive.namelist() == ["My-skill/SKILL.md", "My-skill/scripts/run.py"]
    assert alice.skills.versions.retrieve("latest", skill_id=made.id) == second
    assert alice.skills.versions.delete("1", skill_id=made.id).deleted
    assert alice.skills.retrieve(made.id).default_version == "2"
    with pytest.raises(openai.NotFoundError) as caught:
        alice.skills.versions.content.retrieve("1", skill_id=made.id)
    assert caught.value.code == "skill_version_not_found"
    assert alice.skills.delete(made.id).deleted
    with pytest.raises(openai.NotFoundError):
        alice.skills.versions.create(made.id, files=("s.zip", zipped()))


def test_skill_in_anthropic_s_form(claude: anthropic.Anthropic) -> None:
    skills = claude.beta.skills
    made = skills.create(files=[("s/SKILL.md", FRONT)], display_name="Mine")
    assert (made.type, made.display_name, made.source.type) == ("skill", "Mine", "custom")
    version = skills.versions.create(made.id, files=[("s/SKILL.md", FRONT)])
    assert (version.type, version.skill_id, version.name) == ("skill_version", made.id, "My skill")
    assert skills.retrieve(made.id).latest_version_id == version.id
    assert version in list(skills.versions.list(made.id))
    assert skills.versions.retrieve(version.id, skill_id=made.id) == version
    assert skills.versions.delete(version.id, skill_id=made.id).type == "skill_version_deleted"
    assert made.id in [one.id for one in skills.list()]
    assert skills.delete(made.id).type == "skill_deleted"
    with pytest.raises(anthropic.APIStatusError) as caught:
        skills.create(files=[("s/x", b"")])
    assert caught.value.status_code == 400


@pytest.mark.parametrize(
    "files", [[("files", ("../SKILL.md", FRONT))], [("files", ("s.zip", b"no zip"))], [("files[]", ("s/x", b"")), ("files[]", ("t/y", b""))],
              [("files", (f"s/{n}", b"")) for n in range(12)]], ids=range(4),
)  # fmt: skip
def test_bad_skill_is_422_and_leaves_nothing(http: httpx.Client, state: Path, files: Any) -> None:
    before = blobs(state)
    answer = http.post("/v1/skills", files=files)
    assert (answer.status_code, answer.json()["error"]["type"]) == (422, "invalid_request_error")
    assert_no_more(state, before)


def test_form_without_a_skill_is_400(http: httpx.Client) -> None:
    assert http.post("/v1/skills", files={"other": ("s/SKILL.md", FRONT)}).json()["error"]["param"] == "files"


def test_skills_need_the_tools_that_use_them(http: httpx.Client) -> None:
    skills = [{"type": "skill_reference", "skill_id": "skill_1"}]
    tool = {"type": "shell", "environment": {"type": "container_auto", "skills": skills}}
    answer = http.post("/v1/responses", json={"input": "x", "tools": [tool]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "tools[0]")
    assert "--enable-shell" in answer.json()["error"]["message"]
    body = {"messages": HELLO, "max_tokens": 9, "container": {"skills": [{"type": "custom", "skill_id": "skill_1"}]}}
    answer = http.post("/v1/messages", json=body)
    assert answer.status_code == 400
    assert "container" in answer.json()["error"]["message"]


# --- sessions ---------------------------------------------------------------------------------------------------------


def test_session_is_stored_shown_and_deleted(http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": [{"type": "text", "text": "a"}]}, {"role": "assistant", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"},
        {"role": "assistant", "content": "b", "reasoning_content": "because"},
    ]  # fmt: skip
    files = [
        {"id": "file-text", "name": "t.txt", "text": "grüße"}, {"id": "file-raw", "name": "r.bin", "data_base64": "/////w=="},
        {"id": "file-large", "name": "l.txt", "text": "x" * 2000}, {"id": "file-gone", "name": "g.txt", "bytes": 99},
        {"id": "file_1_r0_0", "name": "e.txt", "code": "not_produced", "message": "The tool did not make it"},
    ]  # fmt: skip
    put = http.put("/v1/sessions/s1", json={"messages": messages, "files": files})
    assert (put.status_code, put.content) == (200, b"")
    shown = http.get("/v1/sessions/s1").json()
    assert (shown["messages"], shown["images"], shown["videos"]) == (messages, [], [])
    text, raw, large, gone, failed = shown["files"]
    assert (text["text"], text["preview"], text["mime_type"]) == ("grüße", "grüße", "text/plain")
    assert (raw["data_base64"], raw["bytes"]) == ("/////w==", 4)
    assert (large.get("text"), large["preview"]) == (None, "x" * 1024), "a large body is left out"
    assert not {"text", "preview", "data_base64", "code"} & gone.keys()
    assert (failed["code"], failed["message"]) == ("not_produced", "The tool did not make it")
    statuses = {file["id"]: http.get(f"/v1/files/{file['id']}/content").status_code for file in shown["files"]}
    assert [*statuses.values()] == [200, 200, 200, 410, 422]
    assert http.get("/v1/files/file-large/content").text == "x" * 2000
    http.put("/v1/sessions/s1", json={"messages": []}).raise_for_status()
    assert http.get("/v1/sessions/s1").json()["messages"] == []
    assert [http.delete("/v1/sessions/s1").status_code for _ in range(2)] == [200, 200]
    assert http.get("/v1/sessions/s1").status_code == 404


@pytest.mark.parametrize(
    ("body", "status", "param"),
    [
        ({}, 422, "messages"),
        ({"messages": [{"content": "x"}]}, 400, "messages[0]"),
        ({"messages": [{"role": "tool", "content": "x"}]}, 400, "messages[0].tool_call_id"),
        ({"messages": [], "images": ["x"]}, 400, "images"),
        ({"messages": [], "files": [{"id": "../x", "name": "a"}]}, 400, "files[0].id"),
        ({"messages": [], "files": [{"id": "file-1", "name": "a", "data_base64": "?"}]}, 400, "files[0].data_base64"),
    ],
)
def test_wrong_session_hears_its_field(http: httpx.Client, body: Any, status: int, param: str) -> None:
    answer = http.put("/v1/sessions/wrong", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (status, param), answer.text
    assert http.get("/v1/sessions/wrong").status_code == 404
    assert http.put("/v1/sessions/a%20b", json={"messages": []}).json()["error"]["param"] == "session_id"


def chat(client: openai.OpenAI, text: str, session: str, *, model: str = "m", **extra: Any) -> Any:
    messages: Any = [{"role": "user", "content": text}]
    return client.chat.completions.create(model=model, messages=messages, extra_body={"session_id": session}, **extra)


def test_chat_continues_its_session_whole_or_streamed(alice: openai.OpenAI, http: httpx.Client) -> None:
    first = chat(alice, "one", "talk")
    assert (first.choices[0].message.content, first.model_extra) == ("user: one\nassistant: ", {"session_id": "talk"})
    chunks = list(chat(alice, "two", "talk", stream=True))
    assert [chunk.model_extra.get("session_id") for chunk in chunks] == [None] * (len(chunks) - 1) + ["talk"]
    said = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert said == "user: one\nassistant: user: one\nassistant: \nuser: two\nassistant: "
    shown = http.get("/v1/sessions/talk").json()["messages"]
    assert [one["role"] for one in shown] == ["user", "assistant"] * 2
    assert shown[3]["content"] == said
    messages: Any = [*shown[:2], {"role": "user", "content": "other"}]
    alice.chat.completions.create(model="m", messages=messages, extra_body={"session_id": "talk"})
    shown = http.get("/v1/sessions/talk").json()["messages"]
    assert [one["content"] for one in shown[::2]] == ["one", "other"], "an edited question forgets what came after it"
    with pytest.raises(openai.BadRequestError) as caught:
        chat(alice, "x", "talk", n=2)
    assert caught.value.param == "n"


def test_session_keeps_hidden_calls_and_its_files(alice: openai.OpenAI, http: httpx.Client) -> None:
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    messages = [
        {"role": "user", "content": "q"}, {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "42"}, {"role": "assistant", "content": "a"},
    ]  # fmt: skip
    file = {"id": "file-kept", "name": "k.txt", "text": "kept text"}
    http.put("/v1/sessions/hidden", json={"messages": messages, "files": [file]}).raise_for_status()
    visible: Any = [messages[0], messages[3], {"role": "user", "content": "and?"}]
    made = alice.chat.completions.create(model="m", messages=visible, extra_body={"session_id": "hidden"})
    said = made.choices[0].message.content or ""
    assert "tool: 42" in said
    assert "kept text" in said
    shown = http.get("/v1/sessions/hidden").json()
    assert [one["role"] for one in shown["messages"]] == ["user", "assistant", "tool", "assistant", "user", "assistant"]
    assert [one["id"] for one in shown["files"]] == ["file-kept"]


def test_messages_continue_a_session_and_count_it(claude: anthropic.Anthropic) -> None:
    body: Any = {"model": "m", "messages": [{"role": "user", "content": "one"}], "extra_body": {"session_id": "claude"}}
    first = claude.messages.create(max_tokens=100, **body)
    assert first.model_extra == {"session_id": "claude"}
    body["messages"] = [{"role": "user", "content": "two"}]
    counted = claude.messages.count_tokens(**body).input_tokens
    with claude.messages.stream(max_tokens=100, **body) as stream:
        last = stream.get_final_message()
    prompt_tokens = last.usage.input_tokens + (last.usage.cache_read_input_tokens or 0)
    assert (prompt_tokens, last.model_extra) == (counted, {"session_id": "claude"})
    assert last.content[0].text.startswith("user: one\nassistant: user: one"), last  # type: ignore[union-attr]


def test_answer_that_its_client_left_is_not_stored(server: Server, alice: openai.OpenAI, http: httpx.Client) -> None:
    """Its 500 tokens would take 15 s."""

    def num_running() -> float:
        page = httpx.get(f"{server.url}/metrics", headers=bearer(METRICS), timeout=WAIT_S).text.splitlines()
        lines = [line for line in page if line.startswith("sie_sequences_running{") and '"slow"' in line]
        return sum(float(line.rpartition(" ")[2]) for line in lines)

    stream = chat(alice, "x" * 500, "left", model="slow", stream=True)
    next(iter(stream))
    eventually(lambda: num_running() == 1, "it runs")
    stream.close()
    eventually(lambda: num_running() == 0, "its work still runs")
    with pytest.raises(openai.BadRequestError):
        alice.chat.completions.create(model="m", messages=[], extra_body={"session_id": "left"})
    assert http.get("/v1/sessions/left").status_code == 404


# --- the disk ---------------------------------------------------------------------------------------------------------


def test_full_disk_is_503_and_leaves_nothing(server: Server, alice: openai.OpenAI, state: Path) -> None:
    """A limit on the size of files stands in for the disk."""
    kept = upload(alice)
    before = blobs(state)

    def limit_files(nbytes: int) -> None:
        for pid in server.frontends():
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (nbytes, resource.RLIM_INFINITY))

    limit_files(0)
    try:
        for _ in range(4):
            with pytest.raises(openai.InternalServerError) as caught:
                upload(alice)
            assert (caught.value.status_code, caught.value.code) == (503, "store_unavailable")
        assert alice.files.content(kept.id).read() == b"x,y\n1,2\n"
    finally:
        limit_files(resource.RLIM_INFINITY)
    assert_no_more(state, before)
    assert upload(alice).bytes == 8
    assert server.output.text().count("cannot be kept in") <= 2 * len(server.frontends())


def test_restart_keeps_everything_and_deletes_what_expired(tmp_path: Path) -> None:
    flags = ("--model", "m=stub:generate", "--frontends", "1", "--state-dir", str(tmp_path / "state"))
    with start_server(*flags) as first, connect(first, "unused") as client:
        kept = upload(client)
        skill = client.skills.create(files=("s.zip", zipped()))
        chat(client, "one", "talk")
    with start_server(*flags, "--file-urls", "--max-file-age-s", "1") as second, connect(second, "unused") as client:
        assert client.files.content(kept.id).read() == b"x,y\n1,2\n"
        assert client.skills.retrieve(skill.id) == skill
        assert chat(client, "two", "talk").choices[0].message.content.startswith("user: one")
        short = upload(client)
        eventually(lambda: _status(second, short.id) == 404, "the file has expired")
        for url in (
            f"http://127.0.0.1:{second.port}/health",
            f"http://localhost:{second.port}/metrics",
            "file:///etc/passwd",
        ):
            part: Any = {"type": "input_file", "file_url": url}
            with pytest.raises(openai.BadRequestError, match=r"public address|only http") as caught:
                client.responses.create(model="m", input=[{"role": "user", "content": [part]}])
            assert caught.value.param == "input[0].content[0].file_url"


def _status(server: Server, file_id: str) -> int:
    return httpx.get(f"{server.url}/v1/files/{file_id}", timeout=WAIT_S).status_code
