"""The list of files that a model reads."""

from __future__ import annotations

from sie.agents.store.files import KeptFile
from sie.agents.store.listing import ListedFile, list_files, with_list
from sie.values.generate import ChatMessage


def listed(name: str, text: str | None) -> ListedFile:
    file = KeptFile(
        id=f"file-{name}", name=name, format="", mime_type="text/plain", num_bytes=9, created_s=0, expires_s=1,
        purpose="", tool="",
    )  # fmt: skip
    return ListedFile(id=file.id, file=file, text=text)


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
