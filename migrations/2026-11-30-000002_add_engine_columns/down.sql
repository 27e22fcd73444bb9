ALTER TABLE fga_outbox DROP COLUMN IF EXISTS next_attempt_at, DROP COLUMN IF EXISTS refused_model_id;
