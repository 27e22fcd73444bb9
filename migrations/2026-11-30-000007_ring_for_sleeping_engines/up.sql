-- Wakes engines that sleep, and costs the others nothing: an engine that has nothing to do holds an advisory lock, and
-- only where it does is a NOTIFY sent. Where none sleeps, the inserting transaction takes the same lock, shared, to its
-- end: no engine can fall asleep before it can see the row. The lock is that of 1179074895 ("FGAO") and the table's oid.
SET LOCAL lock_timeout = '500ms';

CREATE OR REPLACE FUNCTION fga_outbox_ring() RETURNS trigger LANGUAGE plpgsql AS $$
BEGIN
    IF NOT pg_catalog.pg_try_advisory_xact_lock_shared(1179074895, TG_RELID::pg_catalog.int4) THEN
        PERFORM pg_catalog.pg_notify('fga_outbox', TG_RELID::pg_catalog.text);
    END IF;
    RETURN NULL;
END
$$;

DROP TRIGGER IF EXISTS fga_outbox_ring ON fga_outbox;
CREATE TRIGGER fga_outbox_ring BEFORE INSERT ON fga_outbox FOR EACH STATEMENT EXECUTE FUNCTION fga_outbox_ring();
