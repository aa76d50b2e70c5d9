-- Calls to models beside those of tools, told apart by their kind.

-- Every call of a tool or to a model on one line: what was to happen, under which key, and whether it has.
-- Asking a model costs, and changes nothing: whoever looks for effects asks for kind = 'tool'.
-- From runs to events, so that a question about one run reads that run alone.
CREATE OR REPLACE VIEW perdure_effects AS
SELECT r.run_id, c.call, c.tool, c.effect, c.key, coalesce(c.attempts, 0) AS attempts, s.state,
    TIMESTAMPTZ 'epoch' + c.started_at * INTERVAL '1 microsecond' AS started_at,
    CASE WHEN s.state IN ('done', 'failed') THEN TIMESTAMPTZ 'epoch' + c.last_at * INTERVAL '1 microsecond' END AS ended_at,
    CASE WHEN c.is_model THEN 'model' ELSE 'tool' END AS kind
FROM perdure_runs AS r CROSS JOIN LATERAL (
    SELECT e.call, (array_agg(e.ts ORDER BY e.seq DESC))[1] AS last_at, (array_agg(e.body ORDER BY e.seq DESC))[1] AS last,
        min(e.ts) FILTER (WHERE e.type IN ('tool_call_initiated', 'model_call_initiated')) AS started_at,
        max(coalesce((e.body ->> 'attempt')::bigint, 1)) FILTER (WHERE e.type IN ('tool_call_initiated', 'model_call_initiated')) AS attempts,
        max(e.body ->> 'tool') AS tool, max(e.body ->> 'effect') AS effect, max(e.body ->> 'key') AS key,
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
) AS s
WHERE c.tool IS NOT NULL;
