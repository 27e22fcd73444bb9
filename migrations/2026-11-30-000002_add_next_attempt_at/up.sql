-- When to try a row again: NULL, now; a time, not before it; infinity, refused by OpenFGA. A nullable column without a
-- default is added without rewriting the table; the lock it takes for that instant is not waited for longer than this.
SET LOCAL lock_timeout = '500ms';

DO $$
DECLARE
    found text;
BEGIN
    SELECT format_type(atttypid, atttypmod) INTO found FROM pg_attribute
    WHERE attrelid = 'fga_outbox'::regclass AND attname = 'next_attempt_at' AND NOT attisdropped;

    IF found IS NULL THEN
        ALTER TABLE fga_outbox ADD COLUMN next_attempt_at timestamptz;
    ELSIF found <> 'timestamp with time zone' THEN
        RAISE EXCEPTION 'the table %.fga_outbox is not what fga-outbox needs, and was left alone: '
            'column next_attempt_at is %, not timestamp with time zone', current_schema(), found;
    END IF;
END
$$;
