"""Tests that OpenSSL's verifier and TLS connections accept the keys and certificates of ``vcuda-certs issue``."""

import json
import os
import signal
import ssl
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from cryptography import x509
from cryptography.hazmat.primitives.serialization import load_pem_private_key

from certs.cli import main
from tests.integration.tls_echo import echo, echoing
from vcuda.tls import File, serving_files, signing_files, write_files
from vcuda.x509 import DEVELOPMENT, make_authority, make_leaf

SERVING = ("ca.crt", "tls.crt", "tls.key")
SERVICE = ("--service", "vcuda-webhook", "--namespace", "vcuda-system")


def run(*arguments: str | Path, env: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, ["issue", *map(str, arguments)], env=env, prog_name="vcuda-certs")


def leaf_of(directory: Path) -> x509.Certificate:
    return x509.load_pem_x509_certificate((directory / "tls.crt").read_bytes())


def names_in(directory: Path) -> list[str]:
    names = leaf_of(directory).extensions.get_extension_for_class(x509.SubjectAlternativeName).value
    return [str(name.value) for name in names]


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(directory.iterdir()) if path.is_file()}


def listing(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def new_set(*, with_ca_key: bool = False) -> tuple[File, ...]:
    now = datetime.now(UTC)
    authority = make_authority(now)
    leaf = make_leaf(authority, DEVELOPMENT, now)
    return serving_files(authority, leaf) + (signing_files(authority) if with_ca_key else ())


def handshake(directory: Path, hostname: str) -> str:
    """Serve one TLS connection with the files of ``directory`` to a client that expects the name ``hostname``."""
    server = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server.load_cert_chain(directory / "tls.crt", directory / "tls.key")
    client = ssl.create_default_context(cafile=directory / "ca.crt")
    client.verify_flags |= ssl.VERIFY_X509_STRICT
    with echoing(lambda: server) as serving, serving.connect(client, hostname) as connection:
        return echo(connection, b"hello").decode()


def test_the_program_writes_keys_that_their_owner_alone_can_read_and_shows_none(directory: Path) -> None:
    """The umask of the process is 0, so that only the program itself can restrict the modes."""
    program = "import os; os.umask(0); from certs.cli import main; main()"
    command = (sys.executable, "-c", program, "issue", "--dir", directory, "--ca-key")
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "PRIVATE KEY" not in done.stdout + done.stderr
    for name in ("tls.key", "ca.key"):
        assert (directory / name).read_text().splitlines()[1] not in done.stdout + done.stderr
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir() if path.is_file()}
    assert modes == {"ca.crt": 0o644, "tls.crt": 0o644, "tls.key": 0o600, "ca.key": 0o600}
    assert stat.S_IMODE((directory / "..data").stat().st_mode) == 0o755
    key = load_pem_private_key((directory / "ca.key").read_bytes(), password=None)
    assert key.public_key() == x509.load_pem_x509_certificate((directory / "ca.crt").read_bytes()).public_key()


def test_a_key_has_its_mode_before_it_has_content(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """If the mode were set later, another user could open the empty file, and read the key after it is written."""
    opened: dict[str, int] = {}
    real = os.open

    def recording(path: Path, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        descriptor = real(path, flags, mode, dir_fd=dir_fd)
        if flags & os.O_CREAT:
            opened[Path(path).name] = stat.S_IMODE(os.fstat(descriptor).st_mode)
        return descriptor

    monkeypatch.setattr(os, "open", recording)
    write_files(directory, new_set(with_ca_key=True))
    assert {name: mode for name, mode in opened.items() if name.endswith(".key")} == {"tls.key": 0o600, "ca.key": 0o600}


def test_the_key_of_the_ca_is_written_only_on_request(directory: Path) -> None:
    run("--dir", directory)
    assert sorted(contents(directory)) == sorted(SERVING)
    keys = [path for path in directory.rglob("*") if path.is_file() and b"PRIVATE" in path.read_bytes()]
    assert {path.name for path in keys} == {"tls.key"}


@pytest.mark.parametrize(("purpose", "accepted"), [("sslserver", True), ("sslclient", False)])
def test_openssl_accepts_the_chain_only_for_a_server(directory: Path, purpose: str, accepted: bool) -> None:
    run("--dir", directory)
    command = ["openssl", "verify", "-x509_strict", "-purpose", purpose, "-CAfile"]
    files = (directory / "ca.crt", directory / "tls.crt")
    done = subprocess.run([*command, *files], capture_output=True, text=True, check=False)
    assert (done.returncode == 0) is accepted, done.stderr


@pytest.mark.parametrize("hostname", ["localhost", "127.0.0.1", "::1", "vcuda-webhook.vcuda-system.svc"])
def test_a_strict_client_completes_a_handshake_with_every_name(directory: Path, hostname: str) -> None:
    """The last name is that of the webhook's Service, by which the API server calls the webhook."""
    run("--dir", directory, *(SERVICE if hostname.endswith("svc") else ()))
    assert handshake(directory, hostname) == "hello"


@pytest.mark.parametrize(
    ("arguments", "names"),
    [
        pytest.param([], ["localhost", "127.0.0.1", "::1"], id="none given: development"),
        pytest.param(["--dns", "A.b", "--dns", "c"], ["a.b", "c"], id="DNS names alone"),
        pytest.param(["--ip", "10.0.0.7"], ["10.0.0.7"], id="an address alone"),
        pytest.param(
            ["--service", "w", "--namespace", "n", "--dns", "w.n", "--dns", "x", "--ip", "::1"],
            ["w", "w.n", "w.n.svc", "w.n.svc.cluster.local", "x", "::1"],
            id="a Service and more",
        ),
    ],
)
def test_the_certificate_is_for_the_requested_names(directory: Path, arguments: list[str], names: list[str]) -> None:
    run("--dir", directory, *arguments)
    assert names_in(directory) == names


def test_every_option_is_an_environment_variable(directory: Path) -> None:
    run("--dir", directory)
    given = {"DIR": directory, "DNS": "a.b c.d", "IP": "10.0.0.7", "SERVICE": "w", "NAMESPACE": "n", "DAYS": "7"}
    switches = {"CA_KEY": "1", "FORCE": "1", "OUTPUT": "json"}
    result = run(env={f"VCUDA_CERTS_{name}": str(value) for name, value in {**given, **switches}.items()})
    document = json.loads(result.stdout)
    assert document["dns"] == ["w", "w.n", "w.n.svc", "w.n.svc.cluster.local", "a.b", "c.d"]
    assert document["ip"] == ["10.0.0.7"]
    assert len(document["files"]) == 4
    assert leaf_of(directory).not_valid_after_utc < datetime.now(UTC) + timedelta(days=8)


def test_the_table_and_the_json_show_the_files_and_their_expiry(directory: Path) -> None:
    result = run("--dir", directory)
    end = leaf_of(directory).not_valid_after_utc
    rows = {line.split()[0]: line for line in result.stdout.splitlines() if line}
    assert rows[str(directory / "tls.crt")].endswith(f"{end:%Y-%m-%d %H:%M UTC}")
    assert rows[str(directory / "tls.key")].split()[-2:] == ["0600", "-"]
    assert result.stdout.endswith("The certificate is valid for localhost, 127.0.0.1, ::1\n")
    document = json.loads(run("--dir", directory, "--force", "-o", "json").stdout)
    expires = {Path(file["path"]).name: file["expires"] for file in document["files"]}
    end = leaf_of(directory).not_valid_after_utc
    assert (document["directory"], sorted(expires)) == (str(directory), sorted(SERVING))
    assert (expires["tls.crt"], expires["tls.key"]) == (f"{end:%Y-%m-%dT%H:%M:%SZ}", None)


@pytest.mark.parametrize("present", ["ca.crt", "ca.key", "tls.crt", "tls.key"])
def test_an_existing_file_is_overwritten_only_with_force(directory: Path, present: str) -> None:
    directory.mkdir()
    (directory / present).write_text("precious")
    result = run("--dir", directory)
    assert (result.exit_code, contents(directory), listing(directory)) == (2, {present: b"precious"}, [present])
    assert f"{present}. Use --force to replace these files" in result.stderr


@pytest.mark.parametrize("earlier", ["a set of this command", "plain files"])
def test_force_replaces_the_whole_set_and_no_other_file(directory: Path, earlier: str) -> None:
    run("--dir", directory, "--ca-key")
    if earlier == "plain files":
        old = contents(directory)
        directory = directory.with_name("plain")
        directory.mkdir()
        for name in SERVING:
            (directory / name).write_bytes(old[name])
    before = contents(directory)
    (directory / "notes.txt").write_text("precious")
    assert run("--dir", directory, "--force").exit_code == 0
    after = contents(directory)
    assert after.pop("notes.txt") == b"precious"
    assert sorted(after) == sorted(SERVING)
    assert all(after[name] != before[name] for name in SERVING)
    assert handshake(directory, "localhost") == "hello"
    # The directory also has notes.txt, the link ..data, and the directory that ..data points to.
    assert len(listing(directory)) == len(SERVING) + 3


def test_a_reader_finds_a_complete_set_at_every_step(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(directory, new_set())
    old = contents(directory)
    seen: list[dict[str, bytes]] = []
    real = Path.replace

    def looking(path: Path, target: Path) -> Path:
        seen.append(contents(directory))
        moved = real(path, target)
        seen.append(contents(directory))
        return moved

    monkeypatch.setattr(Path, "replace", looking)
    files = new_set()
    write_files(directory, files)
    assert seen == [old, {file.name: file.content for file in files}]


@pytest.mark.parametrize("failing_step", range(4))
def test_a_write_that_fails_keeps_the_old_set_and_cleans_up(
    directory: Path, monkeypatch: pytest.MonkeyPatch, failing_step: int
) -> None:
    """The program syncs three files and a directory before it replaces links. Each of the four calls fails once."""
    write_files(directory, new_set())
    old, listed = contents(directory), listing(directory)
    steps = iter(range(4))

    def failing(_descriptor: int) -> None:
        if next(steps) == failing_step:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", failing)
    result = run("--dir", directory, "--force")
    assert result.exit_code == 2
    assert "No space left on device" in result.stderr
    assert (contents(directory), listing(directory)) == (old, listed)


@pytest.mark.parametrize("moment", ["before", "after"])
def test_the_next_run_removes_the_files_of_a_run_that_was_killed_around_the_swap(directory: Path, moment: str) -> None:
    """These files may include the CA's key, in a hidden directory."""
    write_files(directory, new_set(with_ca_key=True))
    command = (sys.executable, "-c", KILLED, directory, moment)
    killed = subprocess.run(command, check=False, cwd=Path(__file__).parents[2])
    assert killed.returncode == -signal.SIGKILL
    assert len(list(directory.glob("..issued-*"))) == 2
    write_files(directory, new_set())
    [version] = directory.glob("..issued-*")
    assert (directory / "..data").readlink() == Path(version.name)
    assert not list(directory.rglob("ca.key"))


KILLED = """
import os, signal, sys
from pathlib import Path
from vcuda.tls import write_files
from tests.integration.test_issue import new_set
directory, moment = Path(sys.argv[1]), sys.argv[2]
rename = Path.replace
def killed(path, target):
    if target.name == "..data":
        if moment == "after":
            rename(path, target)
        os.kill(os.getpid(), signal.SIGKILL)
    return rename(path, target)
Path.replace = killed
write_files(directory, new_set(with_ca_key=True))
"""


def test_two_runs_at_once_leave_one_whole_set(directory: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        for _ in pool.map(lambda _: write_files(directory, new_set()), range(40)):
            pass
    [version] = directory.glob("..issued-*")
    assert (directory / "..data").readlink() == Path(version.name)
    assert handshake(directory, "localhost")


def test_an_interrupt_right_after_the_swap_keeps_the_new_set(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_files(directory, new_set())
    real = Path.replace

    def interrupted(path: Path, target: Path) -> Path:
        real(path, target)
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", interrupted)
    files = new_set()
    with pytest.raises(KeyboardInterrupt):
        write_files(directory, files)
    assert contents(directory) == {file.name: file.content for file in files}


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        pytest.param([], "Missing option '--dir'", id="no directory"),
        pytest.param(["--dir", "d", "--dns", "a_b"], "is not a DNS name", id="DNS name"),
        pytest.param(["--dir", "d", "--dns", "10.0.0.1"], "must be given with --ip", id="address as a name"),
        pytest.param(["--dir", "d", "--ip", "localhost"], "must be an IP address", id="name as an address"),
        pytest.param(["--dir", "d", "--service", "a.b", "--namespace", "n"], "must be a name", id="Service"),
        pytest.param(["--dir", "d", "--service", "s"], "together", id="Service without namespace"),
        pytest.param(["--dir", "d", "--namespace", "n"], "together", id="namespace without Service"),
        pytest.param(["--dir", "d", "--days", "0"], "1<=x<=730", id="no days"),
        pytest.param(["--dir", "d", "--days", "731"], "1<=x<=730", id="longer than the CA"),
        pytest.param(["--dir", "file"], "is a file", id="a file for a directory"),
        pytest.param(["--dir", "file/d"], "cannot write to file/d: Not a directory", id="below a file"),
    ],
)
def test_bad_input_ends_with_status_2_and_a_message_and_writes_no_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, arguments: list[str], sentence: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    result = run(*arguments)
    assert result.exit_code == 2
    assert sentence in result.stderr
    assert listing(tmp_path) == ["file"]
