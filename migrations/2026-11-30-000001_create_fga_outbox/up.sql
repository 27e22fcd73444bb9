-- Creates the table that applications insert into, or adopts the one that is there, whoever made it, once it has been
-- seen to be the same where it matters. Columns of its own, defaults and rows are left as they are.
SET LOCAL lock_timeout = '500ms';

DO $$
DECLARE
    existing pg_class;
    differences text;
BEGIN
    -- Wherever the search_path finds it, as every other program does.
    SELECT c.* INTO existing FROM pg_class c WHERE c.oid = to_regclass('fga_outbox');

    IF existing.oid IS NULL THEN
        CREATE TABLE fga_outbox (
            id bigserial PRIMARY KEY,
            payload jsonb NOT NULL,
            created_at timestamptz NOT NULL DEFAULT now(),
            processed_at timestamptz,
            attempts integer NOT NULL DEFAULT 0,
            last_error text
        );
        CREATE INDEX fga_outbox_pending_idx ON fga_outbox (id) WHERE processed_at IS NULL;
        RETURN;
    END IF;

    IF existing.relkind <> 'r' THEN
        RAISE EXCEPTION '% is not an ordinary table: it was left alone', existing.oid::regclass;
    END IF;

    SELECT string_agg(
        CASE
            WHEN a.attname IS NULL THEN format('column %s (%s) is missing', needed.name, needed.type)
            WHEN format_type(a.atttypid, a.atttypmod) <> needed.type
                THEN format('column %s is %s, not %s', needed.name, format_type(a.atttypid, a.atttypmod), needed.type)
            ELSE format('column %s is NOT NULL, but has to be empty until there is something to say', needed.name)
        END, '; ' ORDER BY needed.at)
    INTO differences
    FROM (VALUES
        (1, 'id', 'bigint', false),
        (2, 'payload', 'jsonb', false),
        (3, 'created_at', 'timestamp with time zone', false),
        (4, 'processed_at', 'timestamp with time zone', true),
        (5, 'attempts', 'integer', false),
        (6, 'last_error', 'text', true)
    ) AS needed (at, name, type, nullable)
    LEFT JOIN pg_attribute a
        ON a.attrelid = existing.oid AND a.attname = needed.name AND a.attnum > 0 AND NOT a.attisdropped
    WHERE a.attname IS NULL
        OR format_type(a.atttypid, a.atttypmod) <> needed.type
        OR (needed.nullable AND a.attnotnull);

    IF differences IS NOT NULL THEN
        RAISE EXCEPTION 'the table % is not what fga-outbox needs, and was left alone: %',
            existing.oid::regclass, differences;
    END IF;

    IF NOT EXISTS (
        SELECT FROM pg_index i JOIN pg_attribute a ON a.attrelid = i.indrelid AND a.attnum = i.indkey[0]
        WHERE i.indrelid = existing.oid AND i.indisunique AND i.indisvalid AND i.indpred IS NULL
            AND i.indnkeyatts = 1 AND a.attname = 'id'
    ) THEN
        RAISE EXCEPTION 'the table % is not what fga-outbox needs, and was left alone: column id is not unique',
            existing.oid::regclass;
    END IF;
END
$$;
