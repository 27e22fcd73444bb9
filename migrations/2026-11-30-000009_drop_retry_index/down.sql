CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_retry_idx ON fga_outbox (next_attempt_at)
    WHERE processed_at IS NULL AND next_attempt_at IS NOT NULL
