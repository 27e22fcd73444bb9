-- Inserts a row in order: two transactions that enqueue a tuple's key by this function take their ids in the order in
-- which they commit. It holds a transaction-scoped advisory lock for each key of the payload; they are taken in sorted
-- order, so that two callers can't wait for each other in a circle within one call.
CREATE OR REPLACE FUNCTION fga_outbox_enqueue(payload jsonb) RETURNS bigint
LANGUAGE plpgsql SET search_path FROM CURRENT AS $$
DECLARE
    key bigint;
    row_id bigint;
BEGIN
    FOR key IN
        SELECT DISTINCT hashtextextended(
            concat_ws(' ', tuple ->> 'user', tuple ->> 'relation', tuple ->> 'object'), 7306360125893043064)
        FROM jsonb_path_query(fga_outbox_enqueue.payload, '$.*[*]') AS tuple ORDER BY 1
    LOOP
        PERFORM pg_advisory_xact_lock(key);
    END LOOP;
    INSERT INTO fga_outbox (payload) VALUES (fga_outbox_enqueue.payload) RETURNING id INTO row_id;
    RETURN row_id;
END
$$;
