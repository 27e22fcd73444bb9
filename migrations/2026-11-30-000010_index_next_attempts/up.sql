-- Rows with a time at which something is due: undelivered ones to be tried again, or refused; delivered ones to be wary of
-- until then. By words that no query uses by accident, so that Postgres takes no other index in its place.
CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_next_attempt_idx
    ON fga_outbox (((processed_at IS NULL)::integer), next_attempt_at) WHERE next_attempt_at IS NOT NULL
