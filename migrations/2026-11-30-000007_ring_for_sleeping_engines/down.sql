SET LOCAL lock_timeout = '500ms';
DROP TRIGGER IF EXISTS fga_outbox_ring ON fga_outbox;
DROP FUNCTION IF EXISTS fga_outbox_ring();
