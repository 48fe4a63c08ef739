//! The whole stack from one builder.
