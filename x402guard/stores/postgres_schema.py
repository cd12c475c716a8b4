"""Defines the schema of a ledger in PostgreSQL, by which name it is one, and how it gets to a next version.

Two functions do the work of a transaction, one round trip each: one loads the rows of some scopes, and one writes what
the changes have made of them, if no row has changed meanwhile. Their names end in the schema's version. A library that is
older or newer than the schema asks for functions that do not exist, so the database refuses it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from x402guard.stores.rows import HOLD_COLUMNS, NODE_COLUMNS, RULE_COLUMNS
from x402guard.stores.sql_reads import names

SCHEMA: Final = "x402guard"
"""Every table and function is in this schema, and every transaction names it: no setting of a connection is trusted."""

ABOUT: Final = f"{SCHEMA}.about"
"""The table by which a ledger is one: it says the ledger's id and version.

In ledgers of the commits before it is ``UNRELEASED``, with versions 1 to 4 of their own. With another name here, none of
those versions is taken for one of these, and those commits refuse this ledger as well.
"""

UNRELEASED: Final = f"{SCHEMA}.ledger"

CONFLICT: Final = "40001"
ANOTHER_LEDGER, ROLLED_BACK, MOVING = "X4001", "X4002", "X4003"

_TURNS: Final = f"hashtext('{SCHEMA} turns')"
_RULES: Final = f"hashtext('{SCHEMA} rules')"
_STRIPE: Final = "mod(abs(hashtext(value)::bigint), 64)::integer"  # few locks, however much a transaction writes

TAKE_TURNS: Final = f"""
SELECT pg_advisory_xact_lock({_TURNS}, stripe) FROM (
    SELECT DISTINCT {_STRIPE} AS stripe
    FROM jsonb_array_elements_text(?::jsonb) ORDER BY stripe) AS stripes
"""
"""Takes the turn for some rows: who has it is alone with them, and who writes one of them without it shares it meanwhile."""

# A role could put a temporary table in the place of one of the catalog's, whose names are looked for there last of all.
IS_OWNER: Final = """pg_catalog.pg_has_role(
        current_user, (SELECT n.nspowner FROM pg_catalog.pg_namespace AS n WHERE n.nspname = 'x402guard'), 'USAGE')"""
_SAFELY: Final = "LANGUAGE plpgsql SET search_path = pg_catalog, pg_temp"

_REFUSES: Final = f"""
CREATE FUNCTION x402guard.{{name}}() RETURNS trigger {_SAFELY} AS $$
BEGIN
    IF NOT {IS_OWNER} THEN
        RAISE EXCEPTION 'only the owner of the ledger {{does}}' USING ERRCODE = 'insufficient_privilege';
    END IF;
    RETURN NEW;
END $$;
"""

_TABLES: Final = """
CREATE SCHEMA x402guard;
CREATE TABLE x402guard.about (
    id uuid PRIMARY KEY DEFAULT gen_random_uuid(),
    one integer NOT NULL DEFAULT 1 UNIQUE CHECK (one = 1),
    version integer NOT NULL,
    is_moving boolean NOT NULL DEFAULT false
);
CREATE TABLE x402guard.nodes (
    id text COLLATE "C" PRIMARY KEY,
    parent_id text COLLATE "C" REFERENCES x402guard.nodes (id),
    kind text NOT NULL,
    name text NOT NULL,
    max_nanos bigint,
    created_ms bigint NOT NULL,
    last_ms bigint NOT NULL,
    captured bigint NOT NULL CHECK (captured >= 0),
    held bigint NOT NULL CHECK (held >= 0),
    granted_out bigint NOT NULL CHECK (granted_out >= 0),
    granted_in bigint NOT NULL CHECK (granted_in >= 0),
    state text NOT NULL,
    terminated_by text,
    starved integer NOT NULL,
    openers text NOT NULL,
    closed_ms bigint,
    seq bigint NOT NULL,
    head text NOT NULL,
    live bigint NOT NULL CHECK (live >= 0),
    "window" text,
    since_ms bigint NOT NULL,
    past bigint NOT NULL,
    reserve bigint NOT NULL,
    finalized integer NOT NULL,
    soft text NOT NULL,
    warned bigint NOT NULL,
    trip_reason text,
    until_ms bigint,
    rowid bigint GENERATED ALWAYS AS IDENTITY,
    version bigint NOT NULL DEFAULT 1,
    rules bigint NOT NULL DEFAULT 1
) WITH (fillfactor = 70);
CREATE INDEX nodes_by_parent ON x402guard.nodes (parent_id);
CREATE INDEX open_nodes ON x402guard.nodes (id) WHERE state = 'open';

CREATE TABLE x402guard.holds (
    id text COLLATE "C" PRIMARY KEY,
    node_id text COLLATE "C" NOT NULL,
    kind text NOT NULL,
    amount bigint NOT NULL CHECK (amount > 0),
    created_ms bigint NOT NULL,
    deadline_unix bigint NOT NULL,
    flying_since_ms bigint NOT NULL,
    owner text NOT NULL,
    purpose text NOT NULL,
    chain_evidence integer NOT NULL,
    purchase_key text,
    intent text,
    state text NOT NULL,
    captured bigint NOT NULL CHECK (captured >= 0),
    evidence text,
    doubt text,
    claim text,
    proof text,
    ended_by text,
    checked_ms bigint NOT NULL,
    presented integer NOT NULL,
    closed_ms bigint NOT NULL,
    delivery text NOT NULL,
    rowid bigint GENERATED ALWAYS AS IDENTITY,
    version bigint NOT NULL DEFAULT 1
) WITH (fillfactor = 80);
CREATE INDEX live_by_deadline ON x402guard.holds (deadline_unix) WHERE state = 'held' AND chain_evidence = 0;
CREATE INDEX live ON x402guard.holds (node_id) WHERE state = 'held';
CREATE INDEX by_purchase ON x402guard.holds (purchase_key, delivery, created_ms) WHERE purchase_key IS NOT NULL;
CREATE INDEX unproven ON x402guard.holds ((state = 'captured'), checked_ms, created_ms)
    WHERE chain_evidence = 1 AND (state = 'held' OR evidence IN ('claimed', 'chain_head'));
CREATE INDEX payments_by_deadline ON x402guard.holds (deadline_unix) WHERE intent IS NOT NULL;
CREATE INDEX payments_on_word ON x402guard.holds (created_ms)
    WHERE intent IS NOT NULL AND state = 'captured' AND evidence <> 'chain';

CREATE TABLE x402guard.entries (
    node_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    at_ms bigint NOT NULL,
    event text NOT NULL,
    hold_id text,
    captured bigint NOT NULL,
    held bigint NOT NULL,
    granted_in bigint NOT NULL,
    granted_out bigint NOT NULL,
    data text NOT NULL,
    previous text NOT NULL,
    hash text NOT NULL,
    PRIMARY KEY (node_id, seq)
);
CREATE TABLE x402guard.archived (
    node_id text COLLATE "C" NOT NULL,
    seq bigint NOT NULL,
    file text NOT NULL,
    digest text NOT NULL,
    said text NOT NULL,
    at_ms bigint NOT NULL,
    PRIMARY KEY (node_id, seq)
);
CREATE FUNCTION x402guard.refuse_change() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF TG_OP = 'DELETE' THEN
        IF EXISTS (SELECT FROM x402guard.archived AS a WHERE a.node_id = OLD.node_id AND a.seq >= OLD.seq) THEN
            RETURN OLD;
        END IF;
    END IF;
    RAISE EXCEPTION 'the journal is append-only';
END $$;
CREATE TRIGGER entries_are_never_changed BEFORE UPDATE OR DELETE ON x402guard.entries
    FOR EACH ROW EXECUTE FUNCTION x402guard.refuse_change();
CREATE TRIGGER entries_are_never_truncated BEFORE TRUNCATE ON x402guard.entries
    FOR EACH STATEMENT EXECUTE FUNCTION x402guard.refuse_change();

CREATE TABLE x402guard.marks (
    kind text COLLATE "C" NOT NULL,
    key text COLLATE "C" NOT NULL,
    value text NOT NULL,
    version bigint NOT NULL DEFAULT 1,
    PRIMARY KEY (kind, key)
) WITH (fillfactor = 70);
INSERT INTO x402guard.about (version) VALUES (0);
"""

_RULES_OF_OWNER: Final = f"""
{_REFUSES.format(name="refuse_limit", does="raises a limit")}
CREATE TRIGGER limits_are_raised_by_the_owner BEFORE UPDATE ON x402guard.nodes FOR EACH ROW
    WHEN (OLD.max_nanos IS NOT NULL AND (NEW.max_nanos IS NULL OR NEW.max_nanos > OLD.max_nanos))
    EXECUTE FUNCTION x402guard.refuse_limit();
{_REFUSES.format(name="refuse_place", does="changes what a budget is")}
CREATE TRIGGER a_budget_stays_what_it_is BEFORE UPDATE ON x402guard.nodes FOR EACH ROW
    WHEN (OLD.id <> NEW.id OR OLD.parent_id IS DISTINCT FROM NEW.parent_id OR OLD.kind <> NEW.kind OR OLD.name <> NEW.name
        OR OLD.created_ms <> NEW.created_ms OR OLD."window" IS DISTINCT FROM NEW."window"
        OR (NEW."window" IS NULL AND OLD.past <> NEW.past))
    EXECUTE FUNCTION x402guard.refuse_place();
CREATE FUNCTION x402guard.is_below_wallet(node_id text) RETURNS boolean {_SAFELY}
    SET plan_cache_mode = force_generic_plan SET enable_seqscan = off SET enable_hashjoin = off SET enable_mergejoin = off AS $$
BEGIN
    RETURN (WITH RECURSIVE above (id, parent_id, kind) AS (
            SELECT n.id, n.parent_id, n.kind FROM x402guard.nodes AS n WHERE n.id = node_id
            UNION SELECT n.id, n.parent_id, n.kind FROM above JOIN x402guard.nodes AS n ON n.id = above.parent_id)
        SELECT bool_or(a.id = 'wallet' AND a.parent_id IS NULL) AND bool_and(a.kind <> 'tokens') FROM above AS a);
END $$;
CREATE FUNCTION x402guard.refuse_root() RETURNS trigger {_SAFELY} AS $$
BEGIN
    IF {IS_OWNER} OR (NEW.kind = 'tokens' AND NEW.parent_id IS NULL)
            OR (NEW.past = 0 AND NEW.parent_id IS NOT NULL AND x402guard.is_below_wallet(NEW.id)) THEN
        RETURN NULL;
    END IF;
    RAISE EXCEPTION 'only the owner of the ledger makes a budget that is not below its wallet'
        USING ERRCODE = 'insufficient_privilege';
END $$;
CREATE TRIGGER a_budget_is_made_below_the_wallet AFTER INSERT ON x402guard.nodes
    FOR EACH ROW EXECUTE FUNCTION x402guard.refuse_root();
"""

TABLES: Final = _TABLES + _RULES_OF_OWNER
"""Version 1. It stays as it is once it is released: what changes then is a step of ``MIGRATIONS``."""

MIGRATIONS: Final[tuple[str, ...]] = (
    # What is looked at each second: what has not ended, the sessions of a name, and the newest ones.
    """
CREATE INDEX nodes_current ON x402guard.nodes (id) WHERE closed_ms IS NULL AND kind <> 'tokens';
CREATE INDEX nodes_by_name ON x402guard.nodes (name) WHERE kind <> 'tokens';
CREATE INDEX nodes_newest ON x402guard.nodes (rowid) WHERE kind <> 'tokens';
""",
    "SELECT 1;",  # the functions have changed
)
"""Step N takes a ledger from version N + 1 to N + 2; the table ``about`` says the version.

After the last one, the ``functions`` are made anew. A change of theirs needs a step, even if it is empty.
"""

VERSION: Final = 1 + len(MIGRATIONS)

BUSY: Final = """busy (id) AS (
    (SELECT id FROM x402guard.nodes
        WHERE state = 'open' AND parent_id IS NOT NULL AND granted_in > captured + held + granted_out
        UNION SELECT node_id FROM x402guard.holds WHERE state = 'held')
    UNION SELECT n.parent_id FROM x402guard.nodes AS n JOIN busy ON n.id = busy.id
)
"""
"""The nodes that keep idle budget or hold something, and all nodes above them. Only an open node keeps idle budget."""

# How many rows JSON has is not known to the server, which takes it for a hundred: it would read a table of some thousand rows
# as a whole, each time. Every query here has an index, and one plan, which is made once for a connection.
_OFF: Final = ("jit", "enable_seqscan", "enable_hashjoin", "enable_mergejoin")
_BY_INDEX: Final = " ".join(("SET plan_cache_mode = force_generic_plan", *(f"SET {name} = off" for name in _OFF)))

LOOKS_BY_INDEX: Final = "".join(f"SET LOCAL {name} = off; " for name in _OFF)
"""The same for a transaction that looks at a few rows."""


def _lost(given: str) -> str:
    """Return the SQL that refuses to go on where the newest entry of the process that asks is not there."""
    of, seq = f"node_id = {given} #>> '{{last,node_id}}'", f"({given} #>> '{{last,seq}}')::bigint"
    return f"""
    IF {given} ->> 'last' IS NOT NULL AND NOT EXISTS (SELECT FROM x402guard.entries AS e
            WHERE e.{of} AND e.seq = {seq} AND e.hash = {given} #>> '{{last,hash}}')
            AND NOT EXISTS (SELECT FROM x402guard.archived AS a WHERE a.{of} AND a.seq >= {seq}) THEN
        RAISE EXCEPTION 'the newest entries are missing' USING ERRCODE = '{ROLLED_BACK}';
    END IF;"""


# STABLE, so that all of its queries see one snapshot: a change that refuses writes nothing, and nothing is compared then.
_LOAD: Final = f"""
CREATE FUNCTION x402guard.load_VERSION(ledger uuid, ask jsonb) RETURNS text LANGUAGE plpgsql STABLE {_BY_INDEX} AS $$
DECLARE
    now_ms bigint := coalesce((ask ->> 'now_ms')::bigint, (extract(epoch FROM clock_timestamp()) * 1000)::bigint);
    moving boolean; hold_ids text[]; owners text[]; above text[]; parents text[];
    node_rows json; busy_rows json; hold_rows json; mark_rows json; sums json;
BEGIN
    SELECT a.is_moving INTO moving FROM x402guard.about AS a WHERE a.id = load_VERSION.ledger;
    IF moving IS NULL THEN
        RAISE EXCEPTION 'another ledger is here now' USING ERRCODE = '{ANOTHER_LEDGER}';
    ELSIF moving THEN
        RAISE EXCEPTION 'a ledger is being moved here' USING ERRCODE = '{MOVING}';
    END IF;
{_lost("ask")}
    hold_ids := ARRAY(SELECT jsonb_array_elements_text(ask -> 'holds')) || ARRAY(
        SELECT h.id FROM x402guard.holds AS h WHERE h.state = 'held' AND h.chain_evidence = 0
        AND h.deadline_unix < now_ms / 1000 ORDER BY h.deadline_unix LIMIT (ask ->> 'due')::integer);
    IF ask -> 'purchases' <> '[]' THEN
        hold_ids := hold_ids || ARRAY(
            SELECT h.id FROM jsonb_array_elements_text(ask -> 'purchases') AS p (key)
            JOIN x402guard.holds AS h ON h.purchase_key = p.key
            WHERE h.delivery IN ('open', 'lost') AND h.state IN ('held', 'captured'));
    END IF;
    IF ask -> 'named' <> '[]' THEN
        hold_ids := hold_ids || ARRAY(
            SELECT last.id FROM jsonb_array_elements_text(ask -> 'named') AS p (key) CROSS JOIN LATERAL (
                SELECT h.id FROM x402guard.holds AS h WHERE h.purchase_key = p.key AND h.delivery = 'done'
                AND h.state IN ('held', 'captured') ORDER BY h.created_ms DESC LIMIT 1) AS last);
    END IF;
    IF (ask ->> 'sweep')::integer > 0 THEN
        hold_ids := hold_ids || ARRAY(
            SELECT part.id FROM (VALUES (false), (true)) AS c (ended) CROSS JOIN LATERAL (
                SELECT h.id FROM x402guard.holds AS h
                WHERE h.chain_evidence = 1 AND (h.state = 'held' OR h.evidence IN ('claimed', 'chain_head'))
                AND (h.state = 'captured') = c.ended AND h.intent IS NOT NULL
                AND (h.state = 'captured' OR h.doubt IS NOT NULL OR h.claim IS NOT NULL
                    OR h.flying_since_ms < now_ms - (ask ->> 'flight_ms')::bigint)
                ORDER BY h.checked_ms, h.created_ms LIMIT (ask ->> 'sweep')::integer) AS part);
    END IF;
    IF hold_ids <> '{{}}' THEN
        SELECT json_agg(h), array_agg(h.node_id), array_agg(h.owner) INTO hold_rows, above, owners
            FROM x402guard.holds AS h WHERE h.id = ANY (hold_ids);
    END IF;
    above := ARRAY(SELECT jsonb_array_elements_text(ask -> 'nodes')) || above;
    parents := above;
    LOOP
        SELECT array_agg(n.parent_id) INTO parents FROM x402guard.nodes AS n
            WHERE n.id = ANY (parents) AND n.parent_id <> ALL (above);
        EXIT WHEN parents IS NULL;
        above := above || parents;
    END LOOP;
    IF above <> '{{}}' THEN
        SELECT json_agg(n) INTO node_rows FROM x402guard.nodes AS n WHERE n.id = ANY (above);
    END IF;
    IF (ask ->> 'busy')::boolean THEN
        WITH RECURSIVE {BUSY}
            SELECT json_agg(n) INTO busy_rows FROM x402guard.nodes AS n WHERE n.id IN (SELECT busy.id FROM busy);
    END IF;
    IF ask -> 'marks' <> '[]' OR owners IS NOT NULL THEN
        SELECT json_agg(m) INTO mark_rows FROM (
            SELECT w.value ->> 0 AS kind, w.value ->> 1 AS key FROM jsonb_array_elements(ask -> 'marks') AS w
            UNION SELECT 'instance', unnest(owners)
        ) AS w JOIN x402guard.marks AS m ON m.kind = w.kind AND m.key = w.key;
    END IF;
    IF ask -> 'out' <> '[]' THEN
        SELECT json_agg(coalesce((
            SELECT sum(h.amount) FROM x402guard.holds AS h WHERE h.state = 'held' AND h.intent IS NOT NULL
            AND h.claim IS NULL AND h.intent::json ->> 'network' = w.value ->> 0 AND h.intent::json ->> 'token' = w.value ->> 1
        ), 0)) INTO sums FROM jsonb_array_elements(ask -> 'out') AS w;
    END IF;
    RETURN json_build_object(
        'now_ms', now_ms, 'nodes', node_rows, 'busy', busy_rows, 'holds', hold_rows, 'marks', mark_rows, 'out', sums)::text;
END $$;
"""

# Rows are locked in the order of their keys, so that no two writers wait for each other. A lock lasts as long as this one
# statement and its commit: no other process waits while Python decides.
_WRITE: Final = """
CREATE FUNCTION x402guard.write_VERSION(ledger uuid, durable boolean, given jsonb) RETURNS void
LANGUAGE plpgsql {by_index} AS $$
DECLARE moving boolean; moved text;
BEGIN
    SELECT a.is_moving INTO moving FROM x402guard.about AS a WHERE a.id = write_VERSION.ledger;
    IF moving IS NULL THEN
        RAISE EXCEPTION 'another ledger is here now' USING ERRCODE = '{another}';
    ELSIF moving THEN
        RAISE EXCEPTION 'a ledger is being moved here' USING ERRCODE = '{moving}';
    END IF;
{lost}
    -- Who has the turn for a row is not overtaken, so that it ends. Who is in turn itself does not wait, but takes that too.
    IF jsonb_array_length(given -> 'mine') > 0 THEN
        IF EXISTS (SELECT FROM (
                SELECT {stripe} AS stripe
                FROM jsonb_array_elements_text(given -> 'turns')
                EXCEPT SELECT {stripe}
                FROM jsonb_array_elements_text(given -> 'mine')) AS stripes
                WHERE NOT pg_try_advisory_xact_lock_shared({turns}, stripe)) THEN
            RAISE EXCEPTION 'it is the turn of another process' USING ERRCODE = '{conflict}', HINT = (
                SELECT string_agg(value, E'\\n') FROM jsonb_array_elements_text(given -> 'turns'));
        END IF;
    ELSE
        PERFORM pg_advisory_xact_lock_shared({turns}, stripe) FROM (
            SELECT DISTINCT {stripe} AS stripe
            FROM jsonb_array_elements_text(given -> 'turns') ORDER BY stripe) AS stripes;
    END IF;
    -- After a change of a budget's rules has been committed, nothing is written below it that has not seen them.
    PERFORM CASE WHEN changes THEN pg_advisory_xact_lock({rules}, lock)
            ELSE pg_advisory_xact_lock_shared({rules}, lock) END FROM (
        SELECT hashtext(id) AS lock, bool_or(changes) AS changes FROM (
            SELECT id, false AS changes FROM jsonb_to_recordset(given #> '{{read,rules}}') AS r (id text, version bigint)
            UNION ALL SELECT value, true FROM jsonb_array_elements_text(given -> 'rules')) AS each
        GROUP BY lock ORDER BY lock) AS ruled;
    IF NOT durable THEN
        PERFORM set_config('synchronous_commit', 'off', true);
    ELSIF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);
    END IF;
{compared_nodes}
    IF given #> '{{read,rules}}' <> '[]' THEN
        SELECT concat_ws(E'\\n', nullif(moved, ''), string_agg(r.id, E'\\n')) INTO moved
            FROM jsonb_to_recordset(given #> '{{read,rules}}') AS r (id text, version bigint)
            LEFT JOIN x402guard.nodes AS n ON n.id = r.id WHERE n.rules IS DISTINCT FROM r.version;
    END IF;
    -- Rows that were not read for this change: after a crash, another history may have come to the same versions.
    SELECT concat_ws(E'\\n', nullif(moved, ''), string_agg(r.id, E'\\n')) INTO moved
        FROM jsonb_populate_recordset(NULL::x402guard.nodes, given -> 'believed') AS r LEFT JOIN x402guard.nodes AS n ON n.id = r.id
        WHERE {believed} OR (n.head IS DISTINCT FROM r.head AND jsonb_exists(given -> 'whole', r.id));
{compared_holds}
{compared_marks}
    IF moved <> '' THEN
        RAISE EXCEPTION 'rows have changed meanwhile' USING ERRCODE = '{conflict}', DETAIL = moved;
    END IF;
    IF EXISTS (SELECT FROM x402guard.nodes AS n WHERE n.id IN (SELECT jsonb_array_elements_text(given #> '{{absent,nodes}}')))
            OR EXISTS (SELECT FROM x402guard.holds AS h
                WHERE h.id IN (SELECT jsonb_array_elements_text(given #> '{{absent,holds}}')))
            OR EXISTS (SELECT FROM x402guard.marks AS m
                JOIN jsonb_to_recordset(given #> '{{absent,marks}}') AS r (kind text, key text)
                ON m.kind = r.kind AND m.key = r.key) THEN
        RAISE EXCEPTION 'rows were added meanwhile' USING ERRCODE = '{conflict}';
    END IF;
    IF given #> '{{changed,nodes}}' <> '[]' THEN
        UPDATE x402guard.nodes AS n SET {set_node}, version = n.version + 1,
                rules = n.rules + (n.id IN (SELECT jsonb_array_elements_text(given -> 'rules')))::integer
            FROM jsonb_populate_recordset(NULL::x402guard.nodes, given #> '{{changed,nodes}}') AS r WHERE n.id = r.id;
    END IF;
    IF given #> '{{new,nodes}}' <> '[]' THEN
        INSERT INTO x402guard.nodes ({nodes})
            SELECT {nodes} FROM jsonb_populate_recordset(NULL::x402guard.nodes, given #> '{{new,nodes}}');
    END IF;
    IF given #> '{{changed,holds}}' <> '[]' THEN
        UPDATE x402guard.holds AS h SET {set_hold}, version = h.version + 1
            FROM jsonb_populate_recordset(NULL::x402guard.holds, given #> '{{changed,holds}}') AS r WHERE h.id = r.id;
    END IF;
    IF given #> '{{new,holds}}' <> '[]' THEN
        INSERT INTO x402guard.holds ({holds})
            SELECT {holds} FROM jsonb_populate_recordset(NULL::x402guard.holds, given #> '{{new,holds}}');
    END IF;
    INSERT INTO x402guard.entries
        SELECT * FROM jsonb_populate_recordset(NULL::x402guard.entries, given -> 'entries');
    IF given #> '{{new,marks}}' <> '[]' THEN
        INSERT INTO x402guard.marks (kind, key, value)
            SELECT kind, key, value FROM jsonb_populate_recordset(NULL::x402guard.marks, given #> '{{new,marks}}');
    END IF;
    IF given #> '{{changed,marks}}' <> '[]' THEN
        INSERT INTO x402guard.marks AS m (kind, key, value)
            SELECT kind, key, value FROM jsonb_populate_recordset(NULL::x402guard.marks, given #> '{{changed,marks}}')
            ON CONFLICT (kind, key) DO UPDATE SET value = excluded.value, version = m.version + 1;
    END IF;
END $$;
"""

# It waits for a write that is under way. After it has answered "no", the write it asks about can no longer be made: the
# node of the fence, which that write has read, has another version.
_IS_WRITTEN: Final = f"""
CREATE FUNCTION x402guard.is_written_VERSION(fence text, wanted jsonb) RETURNS boolean LANGUAGE plpgsql {_BY_INDEX} AS $$
BEGIN
    IF current_setting('synchronous_commit') IN ('off', 'local', 'remote_write') THEN
        PERFORM set_config('synchronous_commit', 'on', true);  -- so that the answer comes when a replica has what it says
    END IF;
    UPDATE x402guard.nodes SET version = version + 1 WHERE id = fence;
    RETURN NOT EXISTS (
        SELECT FROM jsonb_to_recordset(wanted) AS w (node_id text, seq bigint, hash text) WHERE NOT EXISTS (
            SELECT FROM x402guard.entries AS e WHERE e.node_id = w.node_id AND e.seq = w.seq AND e.hash = w.hash));
END $$;
"""


def _compared(table: str, *key: str) -> str:
    """Return the SQL that locks the rows of a table that were read, and adds to ``moved`` those with another version."""
    on, columns = " AND ".join(f"x.{name} = r.{name}" for name in key), ", ".join(f"x.{name}" for name in key)
    read = f"jsonb_to_recordset(given #> '{{read,{table}}}') AS r ({', '.join(f'{name} text' for name in key)}, version bigint)"
    names_of = " || ' ' || ".join(f"r.{name}" for name in key)
    return f"""
    IF given #> '{{read,{table}}}' <> '[]' THEN
        WITH x AS (SELECT {columns}, x.version FROM x402guard.{table} AS x JOIN {read} ON {on}
            ORDER BY {columns} FOR NO KEY UPDATE OF x)
        SELECT concat_ws(E'\\n', nullif(moved, ''), string_agg({names_of}, E'\\n')) INTO moved
            FROM {read} LEFT JOIN x ON {on} WHERE x.version IS DISTINCT FROM r.version;
    END IF;"""


def _set(columns: Sequence[str]) -> str:
    return ", ".join(f'"{name}" = r."{name}"' for name in columns if name != "id")


_PLAIN: Final = {"another": ANOTHER_LEDGER, "moving": MOVING, "conflict": CONFLICT, "by_index": _BY_INDEX} | {
    "turns": _TURNS, "stripe": _STRIPE, "rules": _RULES, "nodes": names(NODE_COLUMNS), "holds": names(HOLD_COLUMNS),
    "believed": " OR ".join(f'n."{name}" IS DISTINCT FROM r."{name}"' for name in RULE_COLUMNS),
}  # fmt: skip
_KEYS: Final = {"nodes": ("id",), "holds": ("id",), "marks": ("kind", "key")}
_COMPARED: Final = {f"compared_{table}": _compared(table, *key) for table, key in _KEYS.items()}
_FUNCTIONS: Final = (
    _LOAD
    + _WRITE.format(
        **_PLAIN, **_COMPARED, lost=_lost("given"), set_node=_set(NODE_COLUMNS), set_hold=_set(HOLD_COLUMNS)
    )
    + _IS_WRITTEN
)


def functions(version: int) -> str:
    """Return what is said once after the steps: the functions of a version, and that there are those of no earlier one."""
    dropped = "".join(
        f"DROP FUNCTION IF EXISTS {SCHEMA}.load_{n}, {SCHEMA}.write_{n}, {SCHEMA}.is_written_{n};"
        for n in range(1, version)
    )
    return dropped + _FUNCTIONS.replace("_VERSION", f"_{version}")
