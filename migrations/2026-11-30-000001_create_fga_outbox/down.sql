-- Delivered rows are evidence, and undelivered ones are owed: the table stays.
SELECT 1;
