//! HTTP and gRPC: the classifier and its parsers.
//!
//! Providers say "not now" in some twenty dialects: a date, seconds, milliseconds, a Go duration, an
//! epoch in three units, a text. Whoever misreads one waits a thousand times too long or comes back
//! at once, and the first thing a herd needs is that nobody comes back early. [`HttpClassify`]
//! reads them all, for the reply of any body type; what it cannot know, you can
//! ([`classify_head`], [`classify_body`]).
//!
//! | status | kind |
//! |---|---|
//! | 1xx, 2xx, 3xx | success |
//! | 401, 403 | misconfigured |
//! | 402 | depleted |
//! | 403 with a wait or an empty bucket (GitHub), 420, 429 | throttled |
//! | 408, 5xx | failed; 501 and 505 are not sent again |
//! | 413 with a wait, 503 with a hint, 529 | overloaded |
//! | other 4xx | rejected; 421 and 425 may be sent again |
//!
//! gRPC replies go by their `grpc-status`: [`grpc`]. What an error body changes is listed in
//! the source of `body.rs`, and takes a layer that reads it: [`ClassifyLayer`](crate::ClassifyLayer).
//!
//! ```
//! use std::time::Duration;
//! use tower_herd::{Classify, HttpClassify, Kind, Pushback};
//!
//! let reply = http::Response::builder()
//!     .status(429)
//!     .header("x-ratelimit-remaining-tokens", "0")
//!     .header("x-ratelimit-reset-tokens", "7.66s")
//!     .body(())?;
//! let signal = HttpClassify.classify(Ok(&reply));
//! assert_eq!(signal.kind, Kind::Throttled);
//! assert_eq!(signal.pushback, Pushback::After(Duration::from_millis(7660)));
//! # Ok::<(), http::Error>(())
//! ```
//!
//! The parsers are plain functions over bytes, of use on their own: [`value`], [`retry_after`],
//! [`grpc`].

pub(crate) mod body;
pub(crate) mod dialect;
pub mod grpc;
pub(crate) mod head;
mod reset;
pub mod retry_after;
pub mod value;

pub use head::{
    ClassifyBody, ClassifyHead, Head, HttpClassify, HttpClassifyAt, classify_body, classify_head,
};
