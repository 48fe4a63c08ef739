//! Pages about using the layers, rather than about one of them.

#[doc = include_str!("retries.md")]
pub mod retries {}
