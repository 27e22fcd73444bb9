// @generated automatically by Diesel CLI.

diesel::table! {
    fga_outbox (id) {
        id -> Int8,
        payload -> Jsonb,
        created_at -> Timestamptz,
        processed_at -> Nullable<Timestamptz>,
        attempts -> Int4,
        last_error -> Nullable<Text>,
        next_attempt_at -> Nullable<Timestamptz>,
        refused_model_id -> Nullable<Text>,
    }
}
