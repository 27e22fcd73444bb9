CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_pending_idx ON fga_outbox (id) WHERE processed_at IS NULL
