-- perdure_effects has the request, the response and the error of each call, and the key of every call.

-- SHA-256 over these parts, each behind its length in eight bytes, as core/identity.py makes it; in hex.
CREATE FUNCTION perdure_key(VARIADIC parts TEXT[]) RETURNS TEXT LANGUAGE sql IMMUTABLE AS $$
    SELECT encode(sha256(string_agg(int8send(octet_length(convert_to(part, 'UTF8'))::bigint) || convert_to(part, 'UTF8'), ''::bytea ORDER BY place)), 'hex')
    FROM unnest(parts) WITH ORDINALITY AS p (part, place)
$$;

-- Every call of a tool or to a model on one line: what was to happen, under which key, whether it has, and what came of it.
-- Asking a model costs, and changes nothing: for effects alone, select kind = 'tool'.
-- From runs to events, so that a question about one run reads that run alone.
-- `request` and `response` are what was recorded, also from a blob. Of a question to a model the request is the part that is new.
CREATE OR REPLACE VIEW perdure_effects AS
SELECT r.run_id, c.call, c.tool, c.effect,
    coalesce(nullif(c.key, ''), CASE WHEN coalesce((f.body ->> 'key_scheme')::bigint, 1) = 1
        THEN perdure_key('perdure-call-1', f.body ->> 'tenant', f.body ->> 'run_id', c.call::text)
        ELSE perdure_key('perdure-call-2', coalesce(f.body ->> 'key_namespace', ''), f.body ->> 'tenant', f.body ->> 'run_id',
            f.body ->> 'agent', c.call::text, c.tool) END) AS key,
    coalesce(c.attempts, 0) AS attempts, s.state,
    TIMESTAMPTZ 'epoch' + c.started_at * INTERVAL '1 microsecond' AS started_at,
    CASE WHEN s.state IN ('done', 'failed') THEN TIMESTAMPTZ 'epoch' + c.last_at * INTERVAL '1 microsecond' END AS ended_at,
    CASE WHEN c.is_model THEN 'model' ELSE 'tool' END AS kind,
    CASE WHEN c.args ? 'json' THEN c.args -> 'json' WHEN c.args ? 'text' THEN perdure_json(c.args ->> 'text')
        ELSE (SELECT perdure_json(convert_from(b.data, 'UTF8')) FROM perdure_blobs AS b WHERE b.digest = decode(c.args ->> 'blob', 'hex')) END AS request,
    CASE WHEN c.result ? 'json' THEN c.result -> 'json' WHEN c.result ? 'text' THEN perdure_json(c.result ->> 'text')
        ELSE (SELECT perdure_json(convert_from(b.data, 'UTF8')) FROM perdure_blobs AS b WHERE b.digest = decode(c.result ->> 'blob', 'hex')) END AS response,
    CASE WHEN c.result IS NULL THEN (c.failure ->> 'type') || ': ' || (c.failure ->> 'message') END AS error
FROM perdure_runs AS r CROSS JOIN LATERAL (
    SELECT e.call, (array_agg(e.ts ORDER BY e.seq DESC))[1] AS last_at, (array_agg(e.body ORDER BY e.seq DESC))[1] AS last,
        min(e.ts) FILTER (WHERE e.type IN ('tool_call_initiated', 'model_call_initiated')) AS started_at,
        max(coalesce((e.body ->> 'attempt')::bigint, 1)) FILTER (WHERE e.type IN ('tool_call_initiated', 'model_call_initiated')) AS attempts,
        max(e.body ->> 'tool') AS tool, max(e.body ->> 'effect') AS effect, max(e.body ->> 'key') AS key,
        -- The last arguments count: a person may have edited the first ones.
        (array_agg(e.body -> 'args' ORDER BY e.seq DESC) FILTER (WHERE e.body ? 'args'))[1] AS args,
        (array_agg(e.body -> 'result' ORDER BY e.seq DESC) FILTER (WHERE e.body ? 'result'))[1] AS result,
        (array_agg(e.body -> 'failure' ORDER BY e.seq DESC) FILTER (WHERE e.body ? 'failure'))[1] AS failure,
        -- One that waits for its turn, or for a budget, is told by what is proposed: no tool has such arguments.
        bool_or(e.type LIKE 'model\_call\_%' OR coalesce(e.body #> '{args,json}' ?& '{digest,then}', false)
            OR coalesce(e.body #>> '{args,preview}' LIKE '{"digest":"%","frame%', false)) AS is_model
    FROM (
        SELECT e.run, e.seq, e.call, e.ts, e.type, perdure_json(e.data) AS body FROM perdure_events AS e
        WHERE e.run = r.id AND e.call IS NOT NULL AND (e.type LIKE 'tool\_call\_%' OR e.type LIKE 'model\_call\_%' OR e.type = 'retry_scheduled')
        OFFSET 0 -- or each use of body would take the JSON apart again
    ) AS e
    GROUP BY e.call
) AS c CROSS JOIN LATERAL (
    SELECT CASE c.last ->> 'type'
        WHEN 'tool_call_proposed' THEN 'waiting for ' || (c.last ->> 'until')
        WHEN 'tool_call_initiated' THEN 'started'
        WHEN 'model_call_initiated' THEN 'started'
        WHEN 'tool_call_completed' THEN 'done'
        WHEN 'model_call_completed' THEN 'done'
        WHEN 'tool_call_in_doubt' THEN 'in doubt'
        WHEN 'tool_call_failed' THEN CASE WHEN c.last ->> 'final' = 'true' THEN 'failed' ELSE 'waiting to be tried again' END
        WHEN 'model_call_failed' THEN CASE WHEN c.last ->> 'final' = 'true' THEN 'failed' ELSE 'waiting to be tried again' END
        WHEN 'tool_call_resolved' THEN CASE c.last ->> 'outcome' WHEN 'happened' THEN 'done' WHEN 'failed' THEN 'failed'
            ELSE 'waiting to be tried again' END
        WHEN 'retry_scheduled' THEN 'waiting to be tried again' END AS state
) AS s CROSS JOIN LATERAL (
    SELECT perdure_json(e.data) AS body FROM perdure_events AS e WHERE e.run = r.id AND e.seq = 1 OFFSET 0
) AS f
WHERE c.tool IS NOT NULL;
