DROP FUNCTION IF EXISTS fga_outbox_enqueue(jsonb);
