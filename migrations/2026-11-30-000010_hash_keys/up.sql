-- The keys of a payload's tuples, as hashes: rows that have none in common can't contradict each other. What is no tuple
-- has no key, whatever the payload is.
CREATE OR REPLACE FUNCTION fga_outbox_keys(payload jsonb) RETURNS bigint[]
LANGUAGE sql IMMUTABLE PARALLEL SAFE AS $$
    SELECT array_agg(hashtextextended(
        (tuple ->> 'user') || ' ' || (tuple ->> 'relation') || ' ' || (tuple ->> 'object'), 0))
    FROM jsonb_path_query(payload, '$.*[*]') AS tuple
$$;
