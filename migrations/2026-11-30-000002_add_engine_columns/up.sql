-- next_attempt_at, when to try a row again: NULL, now; a time, not before it; infinity, refused by OpenFGA.
-- refused_model_id, the authorization model that it was refused under, so that a newer one brings it back.
-- Nullable columns without a default are added without rewriting the table; the lock they take for that instant is not
-- waited for longer than this.
SET LOCAL lock_timeout = '500ms';

DO $$
DECLARE
    needed record;
    found pg_attribute;
    problem text;
BEGIN
    FOR needed IN VALUES ('next_attempt_at', 'timestamp with time zone'), ('refused_model_id', 'text') LOOP
        SELECT * INTO found FROM pg_attribute
        WHERE attrelid = 'fga_outbox'::regclass AND attname = needed.column1 AND attnum > 0 AND NOT attisdropped;

        IF found.attname IS NULL THEN
            EXECUTE format('ALTER TABLE fga_outbox ADD COLUMN %I %s', needed.column1, needed.column2);
            CONTINUE;
        END IF;
        problem := CASE
            WHEN format_type(found.atttypid, found.atttypmod) <> needed.column2
                THEN format('is %s, not %s', format_type(found.atttypid, found.atttypmod), needed.column2)
            WHEN found.attnotnull THEN 'is NOT NULL, but has to be empty until there is something to say'
            WHEN found.atthasdef THEN 'has a default, but has to be empty until there is something to say'
        END;
        IF problem IS NOT NULL THEN
            RAISE EXCEPTION 'the table % is not what fga-outbox needs, and was left alone: column % %',
                'fga_outbox'::regclass, needed.column1, problem;
        END IF;
    END LOOP;
END
$$;
