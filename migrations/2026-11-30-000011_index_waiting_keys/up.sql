-- Rows that wait for their time, by their keys. The predicate is in words that only the look for such rows uses.
CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_waiting_keys_idx ON fga_outbox USING gin (fga_outbox_keys(payload))
    WITH (fastupdate = off) WHERE (processed_at IS NOT NULL)::integer = 0 AND next_attempt_at < 'infinity'
