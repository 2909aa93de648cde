"""Tests that docs/reference.md is complete, and that the other documents name only things that exist in the code."""

import re

import click
import pytest
from click.testing import CliRunner

from tools.reference import events, flags, keys, metrics, outcomes, page
from tools.reference.sources import ROOT, sentences
from vcuda.admission_review import Outcome
from vcuda.requests.mig import PROFILE
from vcuda.requests.resources import BUILT_IN, CLASS_RESOURCE

DOCUMENTS = (
    *("README.md", "CHANGELOG.md", "CONTRIBUTING.md", "SECURITY.md"),
    *sorted(str(page.relative_to(ROOT)) for page in (ROOT / "docs").rglob("*.md")),
)

OF_USERS = tuple(
    f"{package}.{name}"
    for package, names in {
        "controller.discover": "model_labels",
        "controller.extender": "strategy",
        "controller.garbage": "stale_gc",
        "vcuda": "admission_review k8s_types",
        "vcuda.allocations": "cards given_cards stale",
        "vcuda.claims": "charges digest request",
        "vcuda.discovery": "discovered",
        "vcuda.kube": "informers ledger_store turns",
        "vcuda.placement": "affinity choice nodes patches placement",
        "vcuda.quota": "card_memory document entries grant_entries grant_words model shortage teams values",
        "vcuda.requests": "config bypasses pod_request scheme_settings",
        "webhook": "admission",
        "webhook.ledger": "charging namespace_ledger",
        "webhook.review": "answers claim_review decisions pod_review quota_edit usage_warnings",
    }.items()
    for name in names.split()
)
"""The modules whose texts reach users. Texts of log lines do not count."""

LEAVES = tuple(flags.leaves())
THEIRS = (
    "--admission-control-config-file --help --version --request-timeout --from --for --wait --type --all "
    "--all-namespaces --ignore-not-found --replicas --set --reset-then-reuse-values --no-hooks --full --broken "
    "--clusterrole --group --cascade --server-side --consumable-shares --force-conflicts --take-ownership "
    "--durations --prefix --tail"
)
"""Flags of other programs that the documents name."""


@pytest.fixture(scope="module")
def said() -> tuple[str, ...]:
    return tuple(told.message for chapter in page.chapters() for told in chapter.messages)


@pytest.fixture(scope="module")
def rendered() -> str:
    return page.render()


def test_the_page_equals_the_generated_one(rendered: str) -> None:
    assert page.PATH.read_text(encoding="utf-8") == rendered, "docs/reference.md is outdated: run `make reference`"


@pytest.mark.parametrize("leaf", LEAVES, ids=[leaf.name for leaf in LEAVES])
def test_every_flag_that_help_shows_is_in_the_page_with_its_variable(leaf: flags.Leaf, rendered: str) -> None:
    """docs/reference.md is generated from other data than the output of --help, so the two could differ."""
    section = rendered.partition(f"### {leaf.name}\n")[2].partition("\n### ")[0]
    shown = CliRunner().invoke(leaf.command, ["--help"])
    options = shown.output.partition("\nOptions:\n")[2]
    named = set(re.findall(r"^  (?:-\w, )?(--[a-z-]+)", options, re.MULTILINE)) - {"--help", "--version"}
    variables = set(re.findall(r"env\s+var:\s+(\w+)", options))
    assert named
    assert {flag for flag in named if not re.search(rf"{flag}[ `]", section)} == set()
    assert {variable for variable in variables if f"`{variable}`" not in section} == set()


def test_every_flag_has_a_variable_but_those_of_the_plugin() -> None:
    """docs/reference.md and the README promise a variable for each of these flags."""
    without = {leaf.name: [option.name for option in options(leaf) if not variables(leaf, option)] for leaf in LEAVES}
    assert {name for name, flags in without.items() if flags} == {
        "kubectl gpuquota",
        "kubectl gpuquota explain",
        "kubectl gpuquota doctor",
        "kubectl gpuquota nodes",
        "kubectl gpuquota rejections",
        "kubectl gpuquota why",
    }
    [plugin] = [leaf for leaf in LEAVES if leaf.name == "kubectl gpuquota"]
    assert [found for option in options(plugin) for found in variables(plugin, option)] == []
    assert all(option.show_envvar for leaf in LEAVES for option in options(leaf) if variables(leaf, option))


def options(leaf: flags.Leaf) -> list[click.Option]:
    return [each for each in leaf.command.params if isinstance(each, click.Option) and not each.is_eager]


def variables(leaf: flags.Leaf, option: click.Option) -> list[str]:
    return flags.variables(leaf.context, option)


@pytest.mark.parametrize("program", flags.PROGRAMS)
def test_every_program_prints_its_version(program: str) -> None:
    command = flags.PROGRAMS[program]
    shown = CliRunner().invoke(command, ["--version"], prog_name=program)
    assert shown.exit_code == 0
    assert re.fullmatch(rf"{program} \d+\.\d+\.\d+\n", shown.output)


def test_every_metric_of_the_source_is_in_a_registry_that_the_page_is_made_from() -> None:
    found = {family.name for families in metrics.families().values() for family in families}
    assert {name for name in metrics.in_the_source() if not {name, f"{name}_total"} & found} == set()


def test_exactly_the_posted_events_are_documented() -> None:
    assert events.posted() == events.TOLD.keys()


def test_exactly_the_used_annotations_and_labels_are_documented() -> None:
    there = keys.in_the_source() | keys.in_the_manifests()
    assert there - keys.OURS.keys() - keys.of_schemes() - BUILT_IN.scheme_of.keys() == {
        CLASS_RESOURCE,
        PROFILE,
        "nvidia.com/",
        "nvidia.com/hostdev",
        "nvidia.com/priority",
        "node.kubernetes.io/not-ready",
        "node.kubernetes.io/unreachable",
        "node.kubernetes.io/unschedulable",
    }
    assert keys.OURS.keys() - there == set()


def test_exactly_the_possible_outcomes_are_documented() -> None:
    assert set(Outcome) == outcomes.OUTCOMES.keys()
    assert outcomes.incidents() == outcomes.INCIDENTS.keys()


@pytest.mark.parametrize("module", OF_USERS)
def test_every_message_that_reaches_users_is_documented(module: str, said: tuple[str, ...]) -> None:
    assert [sentence for sentence in sentences(module) if not any(map(sentence.said_in, said))] == []


# Tests of the flags and metrics that documents name


@pytest.mark.parametrize("name", DOCUMENTS)
def test_a_document_names_only_existing_flags_and_metrics(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    ours = {option for leaf in LEAVES for each in leaf.command.params for option in each.opts}
    assert set(re.findall(r"(?<![\w-])--[a-z][a-z-]+", text)) - ours - {*THEIRS.split()} == set()
    families = {family.name for found in metrics.families().values() for family in found}
    suffixed = {f"{family}{suffix}" for family in families for suffix in ("", "_bucket", "_sum", "_count")}
    assert set(re.findall(r"\bvcuda_[a-z_]+", text)) - suffixed == set()


@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_file_that_a_document_names_exists(name: str) -> None:
    text = (ROOT / name).read_text(encoding="utf-8")
    named = re.findall(r"\b(?:manifests|docs|tests)/[\w./-]*\w", text)
    assert [path for path in named if not (ROOT / path).exists()] == []
