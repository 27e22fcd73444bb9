-- Rows that can overrule what others merely write: of all pending rows, these have to be looked at before most are sent.
CREATE INDEX CONCURRENTLY IF NOT EXISTS fga_outbox_overruling_idx ON fga_outbox (id)
    WHERE (processed_at IS NULL)::integer = 1 AND (payload ? 'deletes' OR payload @> '{"writes": [{"condition": {}}]}')
