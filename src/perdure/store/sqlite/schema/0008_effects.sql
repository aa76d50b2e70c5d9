-- perdure_effects has the request, the response and the error of each call, and the key of every call.

-- Every call of a tool or to a model on one line: what was to happen, under which key, whether it has, and what came of it. Times are UTC.
-- Asking a model costs, and changes nothing: for effects alone, select kind = 'tool'.
-- From runs to events and grouped by run_id, so that a question about one run reads that run alone.
-- `request` and `response` are JSON as it was recorded, also from a blob. Of a question to a model the request is the part that is new.
-- A digest is compared as hex, because a prompt of SQLite before 3.41 has no unhex.
-- A key that the journal does not have is computed here as in core/identity.py: with SHA-256, which SQLite does not have, as a
-- recursive query. That takes a few milliseconds for a call, and only if `key` is selected.
-- SQLite has no exclusive or: that of three words is x + y + z - 2 * (the bits that two of them have). A word behind itself in 64 bits
-- (d) is rotated by a shift. Only the low 32 bits of such a sum are used.
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
        -- The last arguments count: a person may have edited the first ones.
        max(iif(json_valid(e.data) AND e.data -> '$.args' IS NOT NULL, e.id, NULL)) AS args_at,
        max(iif(json_valid(e.data) AND e.data -> '$.result' IS NOT NULL, e.id, NULL)) AS result_at,
        max(iif(json_valid(e.data) AND e.data -> '$.failure' IS NOT NULL, e.id, NULL)) AS failure_at,
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
        WHEN 'retry_scheduled' THEN 'waiting to be tried again' END AS state,
        iif(json_valid(f.data), f.data, '{}') AS first, a.data -> '$.args' AS args, o.data -> '$.result' AS result,
        x.data -> '$.failure' AS failure
    FROM calls AS c CROSS JOIN perdure_events AS l ON l.id = c.last
        LEFT JOIN perdure_events AS f ON f.id = (c.last >> 32 << 32) + 1
        LEFT JOIN perdure_events AS a ON a.id = c.args_at
        LEFT JOIN perdure_events AS o ON o.id = c.result_at
        LEFT JOIN perdure_events AS x ON x.id = c.failure_at
)
SELECT run_id, call, tool, effect,
    CASE WHEN key <> '' THEN key ELSE (
        WITH RECURSIVE message (m) AS ( -- each part behind its length in eight bytes, as core/identity.py makes it; in hex
            SELECT group_concat(printf('%016X', length(CAST(value AS BLOB))) || hex(CAST(value AS BLOB)), '') FROM json_each(
                iif(ifnull(first ->> '$.key_scheme', 1) = 1,
                    json_array('perdure-call-1', first ->> '$.tenant', first ->> '$.run_id', CAST(call AS TEXT)),
                    json_array('perdure-call-2', ifnull(first ->> '$.key_namespace', ''), first ->> '$.tenant', first ->> '$.run_id',
                        first ->> '$.agent', CAST(call AS TEXT), tool)))
        ), words (i, p, w0, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15) AS (
            -- The message, padded to blocks of 64 bytes; and the words of the blocks, of which w15 is the last: 16 of each block are in
            -- it, and 48 follow from those before.
            SELECT 0, m || '80' || hex(zeroblob((119 - length(m) / 2 % 64) % 64)) || printf('%016X', length(m) * 4),
                0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0
            FROM message
            UNION ALL
            SELECT i + 1, p, w1, w2, w3, w4, w5, w6, w7, w8, w9, w10, w11, w12, w13, w14, w15, iif(i % 64 < 16,
                (SELECT sum(instr('123456789ABCDEF', substr(p, i / 64 * 128 + i % 64 * 8 + 1 + value, 1)) << 28 - 4 * value)
                    FROM json_each('[0, 1, 2, 3, 4, 5, 6, 7]')),
                (w9 + w0
                + (SELECT x + y + z - 2 * ((x & y) | (x & z) | (y & z))
                    FROM (SELECT d >> 17 AS x, d >> 19 AS y, w14 >> 10 AS z FROM (SELECT w14 | (w14 << 32) AS d)))
                + (SELECT x + y + z - 2 * ((x & y) | (x & z) | (y & z))
                    FROM (SELECT d >> 7 AS x, d >> 18 AS y, w1 >> 3 AS z FROM (SELECT w1 | (w1 << 32) AS d)))) & 4294967295)
            FROM words WHERE i < length(p) / 2
        ), turns (i, kw, t1, t2, a, b, c, d, e, f, g, h, h0, h1, h2, h3, h4, h5, h6, h7) AS (
            -- 129 steps for each block: two make one of its 64 rounds, and the last one adds the state before.
            SELECT 0, (SELECT json_group_array(w15 + ('[
                1116352408, 1899447441, 3049323471, 3921009573, 961987163, 1508970993, 2453635748, 2870763221, 3624381080, 310598401, 607225278,
                1426881987, 1925078388, 2162078206, 2614888103, 3248222580, 3835390401, 4022224774, 264347078, 604807628, 770255983, 1249150122,
                1555081692, 1996064986, 2554220882, 2821834349, 2952996808, 3210313671, 3336571891, 3584528711, 113926993, 338241895, 666307205,
                773529912, 1294757372, 1396182291, 1695183700, 1986661051, 2177026350, 2456956037, 2730485921, 2820302411, 3259730800, 3345764771,
                3516065817, 3600352804, 4094571909, 275423344, 430227734, 506948616, 659060556, 883997877, 958139571, 1322822218, 1537002063,
                1747873779, 1955562222, 2024104815, 2227730452, 2361852424, 2428436474, 2756734187, 3204031479, 3329325298
                ]' ->> ((i - 1) % 64))) FROM words WHERE i > 0), 0, 0,
                1779033703, 3144134277, 1013904242, 2773480762, 1359893119, 2600822924, 528734635, 1541459225,
                1779033703, 3144134277, 1013904242, 2773480762, 1359893119, 2600822924, 528734635, 1541459225
            UNION ALL
            SELECT i + 1, kw,
                iif(i % 129 % 2, 0,
                    (SELECT x + y + z - 2 * ((x & y) | (x & z) | (y & z))
                        FROM (SELECT d >> 6 AS x, d >> 11 AS y, d >> 25 AS z FROM (SELECT e | (e << 32) AS d)))
                    + h + (e & f) + (~e & g) + (kw ->> (i / 129 * 64 + i % 129 / 2))),
                iif(i % 129 % 2, 0,
                    (SELECT x + y + z - 2 * ((x & y) | (x & z) | (y & z))
                        FROM (SELECT d >> 2 AS x, d >> 13 AS y, d >> 22 AS z FROM (SELECT a | (a << 32) AS d)))
                    + ((a & b) | (a & c) | (b & c))),
                CASE WHEN i % 129 = 128 THEN a + h0 WHEN i % 129 % 2 THEN t1 + t2 ELSE a END & 4294967295,
                CASE WHEN i % 129 = 128 THEN b + h1 WHEN i % 129 % 2 THEN a ELSE b END & 4294967295,
                CASE WHEN i % 129 = 128 THEN c + h2 WHEN i % 129 % 2 THEN b ELSE c END & 4294967295,
                CASE WHEN i % 129 = 128 THEN d + h3 WHEN i % 129 % 2 THEN c ELSE d END & 4294967295,
                CASE WHEN i % 129 = 128 THEN e + h4 WHEN i % 129 % 2 THEN d + t1 ELSE e END & 4294967295,
                CASE WHEN i % 129 = 128 THEN f + h5 WHEN i % 129 % 2 THEN e ELSE f END & 4294967295,
                CASE WHEN i % 129 = 128 THEN g + h6 WHEN i % 129 % 2 THEN f ELSE g END & 4294967295,
                CASE WHEN i % 129 = 128 THEN h + h7 WHEN i % 129 % 2 THEN g ELSE h END & 4294967295,
                iif(i % 129 = 128, a + h0 & 4294967295, h0), iif(i % 129 = 128, b + h1 & 4294967295, h1),
                iif(i % 129 = 128, c + h2 & 4294967295, h2), iif(i % 129 = 128, d + h3 & 4294967295, h3),
                iif(i % 129 = 128, e + h4 & 4294967295, h4), iif(i % 129 = 128, f + h5 & 4294967295, h5),
                iif(i % 129 = 128, g + h6 & 4294967295, h6), iif(i % 129 = 128, h + h7 & 4294967295, h7)
            FROM turns WHERE i < json_array_length(kw) / 64 * 129
        )
        SELECT printf('%08x%08x%08x%08x%08x%08x%08x%08x', a, b, c, d, e, f, g, h) FROM turns ORDER BY i DESC LIMIT 1
    ) END AS key,
    attempts, state,
    datetime(started_at / 1000000, 'unixepoch') || printf('.%06dZ', started_at % 1000000) AS started_at,
    CASE WHEN state IN ('done', 'failed') THEN datetime(last_at / 1000000, 'unixepoch') || printf('.%06dZ', last_at % 1000000) END AS ended_at,
    iif(is_model, 'model', 'tool') AS kind,
    CASE WHEN args -> '$.json' IS NOT NULL THEN args -> '$.json' WHEN args ->> '$.text' IS NOT NULL THEN args ->> '$.text'
        ELSE (SELECT CAST(b.data AS TEXT) FROM perdure_blob_uses AS u JOIN perdure_blobs AS b ON b.digest = u.digest
            WHERE u.run = last >> 32 AND lower(hex(u.digest)) = args ->> '$.blob') END AS request,
    CASE WHEN result -> '$.json' IS NOT NULL THEN result -> '$.json' WHEN result ->> '$.text' IS NOT NULL THEN result ->> '$.text'
        ELSE (SELECT CAST(b.data AS TEXT) FROM perdure_blob_uses AS u JOIN perdure_blobs AS b ON b.digest = u.digest
            WHERE u.run = last >> 32 AND lower(hex(u.digest)) = result ->> '$.blob') END AS response,
    CASE WHEN result IS NULL THEN (failure ->> '$.type') || ': ' || (failure ->> '$.message') END AS error
FROM stood WHERE tool IS NOT NULL;
