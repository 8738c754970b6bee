"""Faults to load over an Instance, each of which the checker must notice.

Each is the name of the check, what is replaced in which files of ``sql/``, and by what.
"""

from __future__ import annotations

from pathlib import Path

SQL = Path(__file__).parents[2] / "sql"
COMPLETE = "5_api/complete.sql"
CLAIM, CLAIM_DUE = "5_api/claim.sql", "4_internal/_claim_due.sql"
COUNTED = "attempt = l.attempt + 1,"

FAULTS = {
    "complete-compares-no-token": (
        "no_job_is_completed_twice",
        [(COMPLETE, "l.lease_token_hash = sha256(convert_to(p_lease_token, 'UTF8'))")],
        "true",
    ),
    "complete-checks-no-expiry": (
        "no_dead_lease_ends_anything",
        [(COMPLETE, "e.lease_expires_at > clock_timestamp()")],
        "true",
    ),
    "complete-writes-no-evidence": (
        "every_end_has_its_evidence",
        [(COMPLETE, "if found then\n        return true;")],
        "if found then delete from attempt where job_id = p_job_id; return true;",
    ),
    "claim-takes-live-leases": (
        "no_two_leases_of_a_job_are_live_at_once",
        [(CLAIM_DUE, "(l.lease_expires_at is null or l.lease_expires_at <= v_now)")],
        "true",
    ),
    "claim-counts-no-attempt": (
        "fencing_tokens_grow",
        [(CLAIM, COUNTED)],
        "attempt = greatest(l.attempt, 1),",
    ),
}


def load(name, session, schema):
    """Replace the functions of an Instance by broken ones."""
    _, places, broken = FAULTS[name]
    with session.transaction():
        session.execute(f"set local search_path = {schema}, pg_temp")
        session.execute(f"set local role {schema}_owner")
        for path, sound in places:
            text = (SQL / path).read_text(encoding="utf-8")
            assert sound in text, (path, sound)
            session.execute(text.replace(sound, broken))
