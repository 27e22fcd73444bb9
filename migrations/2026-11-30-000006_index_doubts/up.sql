CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_doubt_idx ON fga_outbox (next_attempt_at)
    WHERE processed_at IS NOT NULL AND next_attempt_at IS NOT NULL
