-- Calls to models beside those of tools, told apart by their kind.

-- Every call of a tool or to a model on one line: what was to happen, under which key, and whether it has. Times are UTC.
-- Asking a model costs, and changes nothing: whoever looks for effects asks for kind = 'tool'.
-- From runs to events and grouped by run_id, so that a question about one run reads that run alone.
DROP VIEW perdure_effects;
CREATE VIEW perdure_effects AS
WITH calls AS (
    SELECT r.run_id, e.call, max(e.id) AS last,
        max(iif(json_valid(e.data), e.data ->> '$.tool', NULL)) AS tool,
        max(iif(json_valid(e.data), e.data ->> '$.effect', NULL)) AS effect,
        max(iif(json_valid(e.data), e.data ->> '$.key', NULL)) AS key,
        max(iif(json_valid(e.data) AND e.data ->> '$.type' IN ('tool_call_initiated', 'model_call_initiated'),
            ifnull(e.data ->> '$.attempt', 1), 0)) AS attempts,
        min(iif(json_valid(e.data) AND e.data ->> '$.type' IN ('tool_call_initiated', 'model_call_initiated'), e.ts, NULL)) AS started_at,
        -- One that waits for its turn, or for a budget, is told by what is proposed: no tool has such arguments.
        max(e.data LIKE '{"type":"model\_call\_%' ESCAPE '\' OR iif(json_valid(e.data), e.data ->> '$.args.json.digest' IS NOT NULL
            AND e.data -> '$.args.json.then' IS NOT NULL OR e.data ->> '$.args.preview' GLOB '{"digest":"*","frame*', 0)) AS is_model
    FROM perdure_runs AS r CROSS JOIN perdure_events AS e ON e.id > r.id << 32 AND e.id <= (r.id << 32 | 4294967295)
    WHERE e.call IS NOT NULL AND (e.data LIKE '{"type":"tool\_call\_%' ESCAPE '\' OR e.data LIKE '{"type":"model\_call\_%' ESCAPE '\'
        OR e.data LIKE '{"type":"retry\_scheduled"%' ESCAPE '\')
    GROUP BY r.run_id, e.call
), stood AS (
    SELECT c.*, l.ts AS last_at, CASE iif(json_valid(l.data), l.data ->> '$.type', NULL)
        WHEN 'tool_call_proposed' THEN 'waiting for ' || (l.data ->> '$.until')
        WHEN 'tool_call_initiated' THEN 'started'
        WHEN 'model_call_initiated' THEN 'started'
        WHEN 'tool_call_completed' THEN 'done'
        WHEN 'model_call_completed' THEN 'done'
        WHEN 'tool_call_in_doubt' THEN 'in doubt'
        WHEN 'tool_call_failed' THEN iif(l.data ->> '$.final', 'failed', 'waiting to be tried again')
        WHEN 'model_call_failed' THEN iif(l.data ->> '$.final', 'failed', 'waiting to be tried again')
        WHEN 'tool_call_resolved' THEN CASE l.data ->> '$.outcome' WHEN 'happened' THEN 'done' WHEN 'failed' THEN 'failed'
            ELSE 'waiting to be tried again' END
        WHEN 'retry_scheduled' THEN 'waiting to be tried again' END AS state
    FROM calls AS c CROSS JOIN perdure_events AS l ON l.id = c.last
)
SELECT run_id, call, tool, effect, key, attempts, state,
    datetime(started_at / 1000000, 'unixepoch') || printf('.%06dZ', started_at % 1000000) AS started_at,
    CASE WHEN state IN ('done', 'failed') THEN datetime(last_at / 1000000, 'unixepoch') || printf('.%06dZ', last_at % 1000000) END AS ended_at,
    iif(is_model, 'model', 'tool') AS kind
FROM stood WHERE tool IS NOT NULL;
