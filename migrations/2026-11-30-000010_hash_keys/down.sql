DROP FUNCTION IF EXISTS fga_outbox_keys(jsonb);
