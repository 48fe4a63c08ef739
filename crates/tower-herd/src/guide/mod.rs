//! Pages about the use of the whole, where the other modules are about one layer each.
//!
//! | page | answers |
//! |---|---|
//! | [`retries`] | who else repeats my calls, above and below, and how is that switched off? |

#[doc = include_str!("retries.md")]
pub mod retries {}
