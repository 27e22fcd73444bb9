-- In place of fga_outbox_retry_idx: a predicate that no query gives by accident keeps Postgres from taking the index of
-- all pending rows where it should take this one.
CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_waiting_idx ON fga_outbox (next_attempt_at)
    WHERE (processed_at IS NULL)::integer = 1 AND next_attempt_at IS NOT NULL
