"""What docs/monitoring says of metrics, findings and roles, held to what is there."""

import json
import re
from pathlib import Path

import pytest
import yaml
from prometheus_client import CollectorRegistry
from psycopg.conninfo import make_conninfo

from lenso_jobs.exposition import METRICS, InstanceCollector

MONITORING = Path(__file__).parents[2] / "docs" / "operators" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana-dashboard.json").read_text())
(GROUP,) = yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"]
QUERIES = yaml.safe_load((MONITORING / "postgres_exporter.yml").read_text())
README = (MONITORING / "README.md").read_text()
RUNBOOK = (MONITORING.parent / "runbook.md").read_text()

DOWN, *RULES = GROUP["rules"]
PANELS = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
CHOICE, *VARIABLES = DASHBOARD["templating"]["list"]
SOURCE = {"type": "prometheus", "uid": "${DS_PROMETHEUS}"}
EXPRESSIONS = [
    *(rule["expr"] for rule in GROUP["rules"]),
    *(target["expr"] for panel in PANELS for target in panel["targets"]),
    *(variable["definition"] for variable in VARIABLES),
]


# test_exposition holds these to what is exposed.
LABELS = {
    f"lenso_jobs_{name}": {"schema", *labels} for name, (_, labels) in METRICS.items()
}


@pytest.fixture
def samples(conninfo, worker, enqueue, claim):
    """What the collector exposes of an Instance in which everything has a sample."""
    for _ in range(3):
        enqueue()
    enqueue(available_at="2040-01-01T00:00:00Z")
    worker.execute("select fail(%s, %s, 'refused', false)", claim())
    claim()
    registry = CollectorRegistry()
    collector = InstanceCollector(
        make_conninfo(conninfo, user="operations"), "jobs_email"
    )
    registry.register(collector)
    found = [each for family in registry.collect() for each in family.samples]
    collector.close()
    return found


def test_dashboard_and_alerts_ask_for_what_is_exposed():
    asked = {}
    for expression in EXPRESSIONS:
        for name, matchers in re.findall(
            r"\b(lenso_jobs_\w+)(?:\{(.*?)\})?", expression
        ):
            asked.setdefault(name, set()).update(
                re.findall(r"(\w+)=~?\"", matchers), set()
            )

    assert len(asked) > 10
    for name, matched in asked.items():
        assert matched - {"instance"} <= LABELS.get(name, set()), name


def test_the_dashboard_groups_by_labels_that_its_metrics_have():
    for panel in PANELS:
        for target in panel["targets"]:
            (first, *_) = re.findall(r"lenso_jobs_\w+", target["expr"])
            grouped = re.findall(r"by \((.*?)\)", target["expr"])
            kept = set(", ".join(grouped).split(", ")) - {""}
            shown = set(re.findall(r"\{\{(\w+)\}\}", target["legendFormat"]))
            assert kept <= LABELS[first], panel["title"]
            assert shown <= kept, panel["title"]


def test_the_dashboard_can_be_imported_or_provisioned():
    # Chosen on the dashboard, since __inputs are asked for by the import alone.
    assert (CHOICE["name"], CHOICE["type"]) == ("DS_PROMETHEUS", "datasource")
    assert CHOICE["query"] == "prometheus"
    assert "__inputs" not in DASHBOARD
    assert DASHBOARD["id"] is None
    assert DASHBOARD["schemaVersion"] >= 36
    assert [variable["name"] for variable in VARIABLES] == [
        *("instance", "schema", "queue")
    ]
    for each in [*VARIABLES, *PANELS]:
        assert each["datasource"] == SOURCE
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(set(ids)) == len(ids)
    required = {each["id"] for each in DASHBOARD["__requires"]}
    assert {panel["type"] for panel in PANELS} <= required


def test_panels_do_not_lie_on_one_another():
    taken = set()
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(place["x"], place["x"] + place["w"])
            for y in range(place["y"], place["y"] + place["h"])
        }
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells


def test_every_finding_that_matters_has_one_alert_in_its_words(owner):
    findings = owner.rows(
        "select finding, severity, meaning, remedy from health_finding"
        " where severity <> 'notice'"
    )

    told = [
        (
            re.fullmatch(
                r'lenso_jobs_health_findings\{finding="(\w+)"\} > 0', rule["expr"]
            ).group(1),
            rule["labels"]["severity"],
            rule["annotations"]["summary"].partition("}}: ")[2],
            rule["annotations"]["description"],
        )
        for rule in RULES
    ]

    assert sorted(told) == sorted(
        (
            finding,
            severity,
            meaning,
            f"{remedy.removesuffix('.')}. See docs/operators/runbook.md#{finding}.",
        )
        for finding, severity, meaning, remedy in findings
    )
    headings = set(re.findall(r"^### (\w+)$", RUNBOOK, re.MULTILINE))
    assert {finding for finding, *_ in findings} <= headings


def test_alerts_are_named_for_their_findings_and_wait_a_while():
    assert DOWN["alert"] == "LensoJobsDown"
    assert re.split(" or ", DOWN["expr"]) == [
        "lenso_jobs_up == 0",
        "last_over_time(lenso_jobs_up[1h]) unless lenso_jobs_up",
        'up{job="lenso-jobs"} == 0',
        "absent(lenso_jobs_up)",
    ]
    for rule in RULES:
        finding = re.search(r'finding="(\w+)"', rule["expr"]).group(1)
        assert rule["alert"] == "LensoJobs" + finding.title().replace("_", "")
    for rule in GROUP["rules"]:
        assert re.fullmatch(r"[1-9]\d*m", rule["for"]), rule["alert"]
        # The summary begins with which Instance it is.
        assert rule["annotations"]["summary"].startswith("{{ $labels.schema }}")


# A migration may be at work, and autovacuum that is off is felt by the hour.
PATIENT = {"autovacuum_off", "migration_unfinished"}


def test_alerts_of_critical_findings_wait_one_minute():
    for rule in RULES:
        finding = re.search(r'finding="(\w+)"', rule["expr"]).group(1)
        if rule["labels"]["severity"] == "critical" and finding not in PATIENT:
            assert rule["for"] == "1m", finding


@pytest.mark.slow
def test_the_queries_of_postgres_exporter_return_the_samples_of_the_collector(
    observer, samples
):
    exposed = {
        (each.name, tuple(sorted(each.labels.items()))): each.value for each in samples
    }

    answered = {}
    for name, query in QUERIES.items():
        usages = {
            column: declared["usage"]
            for entry in query["metrics"]
            for column, declared in entry.items()
        }
        with observer.cursor() as cursor:
            cursor.execute(query["query"])
            columns = [column.name for column in cursor.description]
            rows = [dict(zip(columns, row, strict=True)) for row in cursor]
        assert columns == list(usages), name
        for row in rows:
            labels = tuple(
                sorted((c, row[c]) for c, usage in usages.items() if usage == "LABEL")
            )
            for column, usage in usages.items():
                if usage == "GAUGE" and row[column] is not None:
                    answered[f"{name}_{column}", labels] = float(row[column])

    exposed.pop(("lenso_jobs_scrape_seconds", (("schema", "jobs_email"),)))
    assert answered.keys() == exposed.keys()
    for key, value in answered.items():
        assert value == pytest.approx(exposed[key], abs=5), key


def test_the_readme_lists_every_metric():
    listed = re.findall(r"^\| `lenso_jobs_(\w+)` \| (.*?) \|", README, re.MULTILINE)

    assert [(name, labels) for name, labels in listed] == [
        (name, " ".join(f"`{label}`" for label in labels))
        for name, (_, labels) in METRICS.items()
    ]
