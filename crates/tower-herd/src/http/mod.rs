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
//! | 409 with a wait | [in progress](crate::Signal::in_progress), for a request that may be repeated; without a wait, and without the words below, a conflict |
//! | 408, 5xx | failed; 501 and 505 are not sent again |
//! | 413 with a wait, 503 with a hint, 529 | overloaded |
//! | other 4xx | rejected; 421 and 425 may be sent again |
//!
//! gRPC replies go by their `grpc-status`: [`grpc`].
//!
//! The wait, for throttled, overloaded and depleted replies (and a key in flight) only, is the first that can be read of:
//! millisecond headers, `Retry-After`, the body, the reset of the limit that is used up. Numbers are
//! seconds, or epochs by their size; absolute times are compared with the reply's own `Date`.
//!
//! Where a layer has read the error body ([`ClassifyLayer`](crate::ClassifyLayer)), that may say more:
//!
//! | form | says |
//! |---|---|
//! | `idempotency_key_in_use` (Stripe), `PREVIOUS_REQUEST_IN_PROGRESS` (PayPal), `TransactionInProgressException` (DynamoDB), an "Idempotency-Key" that is "outstanding" or "in progress" | [in progress](crate::Signal::in_progress): the request is asked for again, at no charge |
//! | `insufficient_quota`, `billing_error`, "credit balance is too low" | [`Depleted`](crate::Kind::Depleted) |
//! | a quota whose id says `PerDay` (Google) | depleted; its short `RetryInfo` belongs to another quota |
//! | `rate_limit_exceeded`, `ThrottlingException`, `RESOURCE_EXHAUSTED`, `rateLimitExceeded`, ... | [`Throttled`](crate::Kind::Throttled), whatever the status |
//! | GitHub's "secondary rate limit" and "abuse detection" texts | throttled for 60 s |
//! | `overloaded_error`, `server_is_overloaded` | [`Overloaded`](crate::Kind::Overloaded) |
//! | `model_not_found`, `DeploymentNotFound`, `API_KEY_INVALID` | [`Misconfigured`](crate::Kind::Misconfigured) |
//! | `RetryInfo`, `retry_after`, "try again in 20s" | the wait |
//! | an error with `code: 429` inside a 200 (OpenRouter), its `metadata.headers` | throttled, and the wait |
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
//! [`grpc`], [`event_stream`].

pub(crate) mod body;
pub(crate) mod dialect;
pub mod event_stream;
pub mod grpc;
pub(crate) mod head;
mod reset;
pub mod retry_after;
pub(crate) mod stream;
pub mod value;

pub use head::{
    ClassifyBody, ClassifyHead, Head, HttpClassify, HttpClassifyAt, classify_body, classify_head,
};
