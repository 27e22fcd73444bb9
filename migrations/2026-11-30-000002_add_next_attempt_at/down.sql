ALTER TABLE fga_outbox DROP COLUMN IF EXISTS next_attempt_at;
