"""The list of files that a model reads."""

from __future__ import annotations

import msgspec

from sie.agents.store.files import KeptFile
from sie.agents.store.listing import ListedFile, list_files, made_files, mount_files, with_list
from sie.values.generate import ChatMessage


def listed(name: str, text: str | None) -> ListedFile:
    file = KeptFile(
        id=f"file-{name}", name=name, format="", mime_type="text/plain", num_bytes=9, created_s=0, expires_s=1,
        purpose="", tool="",
    )  # fmt: skip
    return ListedFile(id=file.id, file=file, text=text)


def test_files_that_tools_made_are_found_in_their_results() -> None:
    def result(content: str, name: str = "mistralrs_shell") -> ChatMessage:
        return ChatMessage(role="tool", name=name, tool_call_id="c", content=content)

    messages = [
        ChatMessage(role="user", content='{"files":[{"id":"file_u","name":"u"}]}'),
        result('{"status":"success","files":[{"id":"file_a","name":"a"},{"id":"file_b","name":"b"}]}'),
        result('{"files":[{"id":"file_c","name":"a"},{"name":"gone","code":"not_produced"}]}\nPictures were left out'),
        result('{"files":[{"id":"file_x","name":"x"}]}', name="mine"),
        *map(result, ("", "no JSON", '{"files":5}', "[" * 9999)),
    ]
    assert made_files(messages) == ["file_b", "file_c"]


def test_list_is_cut_for_each_file_and_for_all() -> None:
    files = [listed("a", "x" * 9), listed("b", "y" * 4), listed("c", "z" * 4), listed("d", "w")]
    text = list_files(files, max_chars=6, max_all_chars=12)
    assert "The first 6 characters of its text:\nxxxxxx\n[The rest of a is not shown.]" in text
    assert "Its text:\nyyyy\n[End of b.]" in text
    assert "The first 2 characters of its text:\nzz\n" in text
    assert text.endswith("[file-d] d (text/plain, 9 bytes)\nIts text is not shown.")


def test_what_cannot_be_shown_is_named() -> None:
    text = list_files([ListedFile(id="file-x", file=None), listed("b", None)], 9, 9)
    assert "[file-x] is no longer available." in text
    assert "b (text/plain, 9 bytes)\nIt cannot be shown." in text


def test_list_joins_the_instructions_and_leaves_the_rest() -> None:
    user = ChatMessage(role="user", content="u")
    assert with_list([user], "L") == [ChatMessage(role="system", content="L"), user]
    for role in ("system", "developer"):
        assert with_list([ChatMessage(role=role, content="S"), user], "L") == [
            ChatMessage(role=role, content="S\n\nL"), user,
        ]  # fmt: skip


def kept(name: str, file_id: str, blob: str = "b") -> KeptFile:
    file = listed(name, None).file
    assert file is not None
    return msgspec.structs.replace(file, id=file_id, blob=blob)


def test_files_have_names_of_their_own_that_stay_as_turns_are_added() -> None:
    files = [kept("a.csv", "1"), kept("a.csv", "2"), kept("skills", "3"), kept("gone", "4", ""), kept("a.csv", "1")]
    mounted = mount_files(files)
    paths = [file.path for file in mounted]
    assert [file.id for file in mounted] == ["1", "2", "3"]
    assert len(set(paths)) == 3
    assert paths[0] == "a.csv"
    assert paths[1].startswith("a-")
    assert paths[1].endswith(".csv")
    assert paths[2].startswith("skills-"), "the skills of a request have that name"
    assert [file.path for file in mount_files([*files, kept("b", "5")])] == [*paths, "b"]
    assert len(mount_files([kept("x" * 255, "1"), kept("x" * 255, "2")])[1].path) < 256


def test_a_mounted_file_is_listed_with_its_path() -> None:
    shown = [msgspec.structs.replace(listed(name, text), path=f"{name}-1") for name, text in (("a", "x"), ("b", None))]
    text = list_files(shown, 9, 9)
    assert "a (text/plain, 9 bytes) is 'a-1' in the working directory\nIts text:\nx\n" in text
    assert text.endswith("b (text/plain, 9 bytes) is 'b-1' in the working directory")
