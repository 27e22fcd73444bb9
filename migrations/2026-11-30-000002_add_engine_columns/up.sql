-- next_attempt_at, when to try a row again: NULL, now; a time, not before it; infinity, refused by OpenFGA.
-- refused_model_id, the authorization model that it was refused under, so that a newer one brings it back.
-- Nullable columns without a default are added without rewriting the table; the lock they take for that instant is not
-- waited for longer than this.
SET LOCAL lock_timeout = '500ms';

DO $$
DECLARE
    needed record;
    found text;
BEGIN
    FOR needed IN VALUES ('next_attempt_at', 'timestamp with time zone'), ('refused_model_id', 'text') LOOP
        SELECT format_type(atttypid, atttypmod) INTO found FROM pg_attribute
        WHERE attrelid = 'fga_outbox'::regclass AND attname = needed.column1 AND NOT attisdropped;

        IF found IS NULL THEN
            EXECUTE format('ALTER TABLE fga_outbox ADD COLUMN %I %s', needed.column1, needed.column2);
        ELSIF found <> needed.column2 THEN
            RAISE EXCEPTION 'the table %.fga_outbox is not what fga-outbox needs, and was left alone: '
                'column % is %, not %', current_schema(), needed.column1, found, needed.column2;
        END IF;
    END LOOP;
END
$$;
