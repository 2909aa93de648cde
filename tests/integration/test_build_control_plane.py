"""The script that builds the control plane: what it says when it cannot, and that nothing half-built is used later.

Real builds are CI's: it takes minutes. Here Go is a script that answers as the real one does.
"""

import os
import shutil
import signal
import subprocess
import textwrap
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[1] / "e2e" / "build-control-plane"
NEWEST = "1.37.2"
TOOLS = ("bash", "cat", "cut", "flock", "grep", "awk", "head", "mkdir", "mkfifo", "mv", "printf", "rm", "sed", "sort")

GO = """
    #!/bin/bash
    # What go answers; it "builds" programs that say the version they were linked with.
    case "$1" in
      env)
        case "$2" in
          GOVERSION) echo {version} ;;
          GOPROXY) echo https://proxy.example ;;
          *) echo /somewhere ;;
        esac ;;
      version) echo "go version {version} linux/amd64" ;;
      mod)
        {download}
        mkdir -p "$SOURCE"
        printf 'go 1.26.0\\n\\nreplace (\\n\\tk8s.io/api => ./staging/src/k8s.io/api\\n)\\n' >"$SOURCE/go.mod"
        printf '{{\\n\\t"Path": "k8s.io/kubernetes",\\n\\t"Dir": "%s",\\n\\t"Sum": "h1:"\\n}}\\n' "$SOURCE" ;;
      build)
        {build}
        cp go.mod "$SOURCE/built.mod"
        linked=$(sed -E 's/.*gitVersion=(v[0-9.]+).*/\\1/' <<<"$*")
        make() {{ printf '#!/bin/sh\\necho Kubernetes %s\\n' "$linked" >"$1"; chmod +x "$1"; }}
        if [[ "$4" == */etcd ]]; then make "$4"
        else for name in kube-apiserver kube-scheduler kube-controller-manager kubectl; do make "$4$name"; done; fi ;;
    esac
"""

MISSING = "k8s.io/kubernetes@v1.37.99"
NOT_SERVED = f"the Go module proxy has no {MISSING}; 'go list -m -versions k8s.io/kubernetes'"


@dataclass(frozen=True)
class Machine:
    """A machine with these programs on PATH, a home, and the cache in it."""

    directory: Path

    @property
    def cache(self) -> Path:
        return self.directory / ".cache" / "vcuda-control-plane"

    def environment(self, **variables: str) -> dict[str, str]:
        source = {"SOURCE": str(self.directory / "source")}
        return {"PATH": str(self.directory / "bin"), "HOME": str(self.directory), **source, **variables}

    def install(self, name: str, text: str) -> None:
        program = self.directory / "bin" / name
        program.write_text(textwrap.dedent(text).lstrip())
        program.chmod(0o755)

    def install_go(self, version: str = "go1.26.8", download: str = ":", build: str = ":") -> None:
        """A Go of this version; ``download`` and ``build`` are what it does first, in bash."""
        self.install("go", GO.format(version=version, download=download, build=build))

    def run(self, *arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 60}
        return subprocess.run((SCRIPT, *arguments), env=self.environment(**variables), check=False, **options)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    """One that has what every Linux has, and no Go."""
    (tmp_path / "bin").mkdir()
    for name in (*TOOLS, "chmod", "cp", "sh", "env"):
        found = shutil.which(name)
        assert found, name
        (tmp_path / "bin" / name).symlink_to(found)
    return Machine(tmp_path)


def complaint(done: subprocess.CompletedProcess[str]) -> str:
    """The one line that says why it failed; what came before on standard error is progress."""
    assert (done.returncode, done.stdout) == (1, "")
    *progress, last = (line.removeprefix("build-control-plane: ") for line in done.stderr.splitlines())
    assert all(line.startswith(("downloading", "compiling")) for line in progress)
    return last


def test_what_was_built_is_printed_and_kept(machine: Machine) -> None:
    machine.install_go()
    first = machine.run()
    assert (first.returncode, first.stdout) == (0, f"{machine.cache / NEWEST / 'bin'}\n"), first.stderr
    programs = sorted(path.name for path in (machine.cache / NEWEST / "bin").iterdir())
    assert programs == ["etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl"]
    machine.install("go", "#!/bin/sh\nexit 1\n")
    again = machine.run(NEWEST)
    assert (again.returncode, again.stdout, again.stderr) == (0, first.stdout, "")


@pytest.mark.parametrize(
    ("version", "said"),
    [
        ("banana", "banana is no release of Kubernetes; give MAJOR.MINOR.PATCH, for example 1.37.2"),
        ("1.37", "1.37 is no release of Kubernetes"),
        ("1.37.2; rm -rf /", "is no release of Kubernetes"),
        ("../1.37.2", "is no release of Kubernetes"),
        ("1.29.6", "Kubernetes 1.29.6 is not supported; give 1.30.0 or later"),
    ],
)
def test_a_version_that_is_none_is_refused_before_anything_is_done(machine: Machine, version: str, said: str) -> None:
    assert said in complaint(machine.run(version))
    assert not machine.cache.exists()


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (f'{{"Error": "{MISSING}: invalid version: unknown revision v1.37.99"}}', NOT_SERVED),
        (f'{{"Error": "{MISSING}: reading x: 403 Forbidden"}}', NOT_SERVED),
        (
            'go: Get "https://proxy.example": dial tcp: lookup proxy.example',
            "proxy cannot be reached (GOPROXY=https://",
        ),
        ("go: write /root/go/pkg/mod/cache/x: no space left on device", "the disk is full"),
        ("go: something new", "downloading Kubernetes v1.37.2 failed; the output is in"),
    ],
    ids=["unknown release", "release that is not served", "no network", "full disk", "anything else"],
)
def test_a_download_that_fails_says_why_in_one_line(machine: Machine, told: str, said: str) -> None:
    machine.install_go(download=f"echo '{told}' {'' if told.startswith('{') else '>&2'}; exit 1")
    assert said in complaint(machine.run())


def test_a_disk_that_is_full_is_named_while_compiling_too(machine: Machine) -> None:
    machine.install_go(build="echo 'compile: write: no space left on device' >&2; exit 1")
    assert "the disk is full" in complaint(machine.run())
    assert [(machine.cache / left).exists() for left in (NEWEST, f"{NEWEST}.partial")] == [False, False]


@pytest.mark.parametrize("go", [None, "go1.19.8"], ids=["none", "too old"])
def test_without_a_go_that_is_new_enough_it_says_what_to_install_or_to_set(machine: Machine, go: str | None) -> None:
    if go:
        machine.install_go(version=go)
    said = complaint(machine.run())
    assert "install Go 1.26 or later (https://go.dev/dl), or set KUBEBUILDER_ASSETS" in said
    assert "setup-envtest use 1.37.x -p path" in said


def test_a_build_that_was_cut_off_is_never_taken_for_finished(machine: Machine) -> None:
    """Killed with all programs of Kubernetes made and etcd half written: the next call builds everything again."""
    pipe = machine.directory / "reached"
    os.mkfifo(pipe)
    machine.install_go(build=f'if [[ "$4" == */etcd ]]; then echo half >"$4"; echo >{pipe}; read -r <{pipe}; fi')
    building = subprocess.Popen((SCRIPT,), env=machine.environment(), stderr=subprocess.DEVNULL, start_new_session=True)
    assert pipe.read_text() == "\n"
    os.killpg(building.pid, signal.SIGKILL)
    assert building.wait() == -signal.SIGKILL
    assert not (machine.cache / NEWEST).exists()
    machine.install_go()
    assert machine.run().stdout == f"{machine.cache / NEWEST / 'bin'}\n"
    assert "Kubernetes" in (machine.cache / NEWEST / "bin" / "etcd").read_text()


def test_a_cache_that_lost_a_program_is_built_again(machine: Machine) -> None:
    machine.install_go()
    assert machine.run().returncode == 0
    (machine.cache / NEWEST / "bin" / "etcd").unlink()
    assert machine.run().returncode == 0
    assert (machine.cache / NEWEST / "bin" / "etcd").exists()


def test_binaries_of_the_callers_own_are_used_as_they_are(machine: Machine) -> None:
    own = machine.directory / "own"
    own.mkdir()
    assert "holds no etcd or no kube-apiserver" in complaint(machine.run(KUBEBUILDER_ASSETS=str(own)))
    for name in ("etcd", "kube-apiserver"):
        (own / name).write_text("#!/bin/sh\necho Kubernetes v1.34.0\n")
        (own / name).chmod(0o755)
    assert machine.run(KUBEBUILDER_ASSETS=str(own)).stdout == f"{own}\n"
    assert machine.run("1.34.0", KUBEBUILDER_ASSETS=str(own)).stdout == f"{own}\n"
    refused = complaint(machine.run("1.30.14", KUBEBUILDER_ASSETS=str(own)))
    assert f"KUBEBUILDER_ASSETS={own} is Kubernetes v1.34.0, not v1.30.14; unset it to have v1.30.14 built" in refused
