# SPDX-License-Identifier: Apache-2.0
"""The Containerfiles, unbuilt: where they start, who runs in them, what they say of themselves. Offline."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.k8s.cluster import image_name, render
from tests.support.processes import ROOT

FOLDER = ROOT / "deploy" / "images"
FILES = {path.parent.name: path for path in sorted(FOLDER.glob("*/Containerfile"))}
WORKERS = ("worker-cpu", "worker-cuda", "worker-cuda-executor")
SERVICES = {"broker": "broker", "provisioner": "provisioner", **dict.fromkeys(WORKERS, "worker")}
CONTEXTS = {"wheels", "sources", "cuda", "tensorrt"}
"""What a builder brings beside the checkout: README.md says where each is from."""


def commands(name: str) -> str:
    """A Containerfile without comments, a command a line."""
    text = "\n".join(line for line in FILES[name].read_text().splitlines() if not line.lstrip().startswith("#"))
    return text.replace("\\\n", " ")


def test_every_image_that_overlays_name_can_be_built() -> None:
    named = set()
    for overlay in ("one-node", "h200", "consumer-cards", "ci"):
        for each in render(overlay):
            if each["kind"] == "Deployment":
                pod = each["spec"]["template"]["spec"]
                named |= {image_name(made) for made in (*pod.get("initContainers", ()), *pod["containers"])}
    names = {name.removeprefix("ifabric/") for name in named}
    engines = {name for name in names if name.startswith("engine-")}
    assert names - engines - {"postgresql"} == set(FILES) - {"engine"}


@pytest.mark.parametrize("name", FILES)
def test_the_linter_has_nothing_against_it(name: str) -> None:
    linter = Path(sys.executable).with_name("hadolint")
    done = subprocess.run([linter, FILES[name]], capture_output=True, text=True, check=False)
    assert done.stdout + done.stderr == ""


@pytest.mark.parametrize("name", FILES)
def test_it_starts_from_what_its_builder_names_and_fetches_nothing_by_address(name: str) -> None:
    text = commands(name)
    known = {f"${{{argument}}}" for argument in re.findall(r"^ARG (BASE|SERVICES|VENDOR)$", text, re.MULTILINE)}
    for base, stage in re.findall(r"^FROM (\S+)(?: AS (\S+))?$", text, re.MULTILINE):
        assert base in known, "a base by a name of our own could be anything"
        known.add(stage)
    assert "://" not in text
    taken = set(re.findall(r"--from=(\S+)|,?from=([^,\s]+)", text))
    assert {stage or context for stage, context in taken} <= known | CONTEXTS, "nothing comes from an image by its name"


@pytest.mark.parametrize("name", WORKERS)
def test_what_it_asks_of_the_native_build_is_there(name: str) -> None:
    built = "\n".join(path.read_text() for path in (ROOT / "native").glob("**/CMakeLists.txt"))
    built += "\n".join(path.read_text() for path in (ROOT / "native" / "cmake").glob("*.cmake"))
    options = set(re.findall(r"-D(IFAB_\w+)=", commands(name)))
    assert options
    assert {option for option in options if not re.search(rf"(?:option|set)\({option}\b", built)} == set()
    [targets] = re.findall(r"--build /build/out --target ([\w ]+?) *&&", commands(name))
    assert {target for target in targets.split() if f"add_library({target} SHARED" not in built} == set()


def test_what_is_a_vendors_is_mounted_and_only_its_run_time_stays() -> None:
    text = commands("worker-cuda")
    mounted = re.findall(r"--mount=type=bind,from=(cuda|tensorrt),source=/,target=(\S+)", text)
    assert {context for context, _ in mounted} == {"cuda", "tensorrt"}
    assert not re.search(r"COPY --from=(cuda|tensorrt)\b", text)
    kept = dict(re.findall(r"^COPY --from=(\w+) (\S+) ", text.rpartition("\nFROM ")[2], re.MULTILINE))
    assert kept == {"native": "/out/", "runtime": "/opt/tensorrt"}
    [folder] = re.findall(r"LD_LIBRARY_PATH=(\S+)", text)
    assert folder == "/opt/tensorrt/lib", "where a folder is mounted for an image without the run time"


@pytest.mark.parametrize("name", FILES)
def test_nothing_runs_as_root_and_it_says_what_it_is(name: str) -> None:
    last = commands(name).rpartition("\nFROM ")[2]
    inherits = last.startswith("${SERVICES}")
    assert re.findall(r"^USER (\S+)$", last, re.MULTILINE) == ([] if inherits else ["10001:10001"])
    labels = set(re.findall(r"org\.opencontainers\.image\.(\w+)=", last))
    assert labels >= ({"title", "description"} | (set() if inherits else {"licenses", "version", "revision"}))


@pytest.mark.parametrize(("name", "service"), SERVICES.items())
def test_a_service_can_be_asked_for_its_health_and_says_where_it_listens(name: str, service: str) -> None:
    last = commands(name).rpartition("\nFROM ")[2]
    assert re.search(r'^HEALTHCHECK .*"services\.common\.healthcheck", "127\.0\.0\.1:9601"\]$', last, re.MULTILINE)
    assert f"IFAB_{service.upper()}_HEALTH_LISTEN=127.0.0.1:9601" in last
    assert re.search(rf'^ENTRYPOINT \[.*"-m", "services\.{service}"\]$', last, re.MULTILINE)
    [ports] = re.findall(r"^EXPOSE (.+)$", last, re.MULTILINE)
    [pod] = {
        str(sorted(port["containerPort"] for port in each["spec"]["template"]["spec"]["containers"][0]["ports"]))
        for each in render("h200")
        if each["kind"] == "Deployment"
        and service == each["spec"]["template"]["metadata"]["labels"]["app.kubernetes.io/name"]
    }
    assert str(sorted(map(int, ports.split()))) == pod


def test_debians_updates_are_taken_anew_and_no_program_becomes_somebody_else() -> None:
    """What stands on `services` has its first stage below it, whose layer a builder would otherwise keep for ever."""
    first = commands("services").partition("\nFROM ")[2].partition("\nFROM ")[0]
    [argument, run] = first.partition("\n")[2].strip().split("\n")
    assert argument == "ARG UPDATES"
    assert re.search(r'RUN : "\$\{UPDATES\}" .*apt-get update .*apt-get upgrade -y ', run)
    assert run.rstrip().endswith("find / -xdev -type f -perm /6000 -exec chmod a-s {} +")


def test_a_base_that_may_be_another_one_tomorrow_is_refused() -> None:
    done = subprocess.run(
        [ROOT / "scripts" / "images", "services"], env={**os.environ, "BASE": "debian:bookworm-slim"},
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 1
    assert done.stderr.startswith("images: BASE: debian:bookworm-slim may be another image tomorrow")


def test_a_checkout_that_was_not_set_up_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "images").write_bytes((ROOT / "scripts" / "images").read_bytes())
    done = subprocess.run(
        ["bash", tmp_path / "scripts" / "images", "services"], capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stderr) == (1, "images: there is no .venv: run `make setup` first\n")


def test_every_package_of_the_images_is_pinned_as_the_tests_have_it() -> None:
    def pins(name: str) -> set[str]:
        return set(re.findall(r"(?m)^[a-z0-9-]+(?:\[[a-z,-]+\])?==\S+", (ROOT / "requirements" / name).read_text()))

    images = pins("services.lock")
    assert len(images) > 30
    assert images <= pins("dev.lock")
