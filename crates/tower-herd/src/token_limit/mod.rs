//! A limit on the tokens of a minute.
//!
//! # Why
//!
//! Model providers limit tokens, not only calls: one call of 100,000 tokens weighs as much as a hundred
//! short ones. Who counts when the reply comes lets everybody through who asks meanwhile: 663 of 100 in one
//! report (BerriAI/litellm#18730). So a call takes its tokens *before* it is sent, by an estimate, and puts
//! it right when its reply tells what it has used. In process, that is; the limit belongs to the
//! [`Provider`](crate::Provider), and all who share its handle share the tokens.
//!
//! # What is counted
//!
//! | when | the tokens of the call |
//! |---|---|
//! | it is about to be sent | its estimate is taken |
//! | its reply tells what it used, in a stream at its end | the difference is taken, or given back |
//! | it was not executed: a 429, no connection, a refusal of a layer further in | all are given back |
//! | dropped before it was sent, in a queue of ours | all are given back |
//! | dropped, timed out or cut short after that | they stay taken, by the estimate or what it used so far, whichever is more |
//!
//! The bucket holds [`token_burst`](crate::ProviderSettings::token_burst) and fills at
//! [`tokens_per_minute`](crate::ProviderSettings::tokens_per_minute), steadily. Over any window of length `w`
//! no more than `rate * w + burst` is used, plus what the estimates fell short by. That is a debt, paid back
//! before anybody else is served, within 24 h whatever a reply has said. The burst is a minute's tokens by default, as with the providers that tell
//! (Anthropic, OpenAI); for one that counts in fixed minutes, half of it keeps two bursts out of one minute.
//!
//! Limit headers of replies (`x-ratelimit-remaining-tokens`) are not looked at: what others use of the same
//! account shows as a 429, and the [pause](crate::retry_after) obeys that.
//!
//! # Estimates
//!
//! [`ByBytes`] by default, which guesses; [`DeclaredTokens`] in a request's extensions, or a closure, if
//! you know. What is declared to cost more than the burst can never pass: it is refused at once
//! ([`TooLarge`](crate::RefusalKind::TooLarge)), and does not stand in anybody's way (rwz/redis-gcra#6). A guess
//! above the burst is taken for the burst, and corrected by the reply.
//!
//! # Where it stands
//!
//! Inside the [pause](crate::retry_after), or a paused provider's tokens would be handed to calls that cannot
//! be made; and outside the [fleet limit](crate::fleet_limit), so that who waits for tokens holds no slot.
//! Swapped with that, one large call that waits takes a slot from many small ones. It is a layer of its own and
//! no option of the fleet limit because it must know the request's cost and read the reply's body, which a
//! limit on calls need not.
//!
//! # Waiting
//!
//! In order, interactive before batch, a batch call that has waited for 5 s in turns; a large call is not
//! passed by the small ones behind it. Whose turn cannot come before its task's deadline is refused at entry,
//! with the instant from which it would pass ([`Tokens`](crate::RefusalKind::Tokens)). In a ladder nobody waits
//! here: the ladder goes on to another rung, and asks again at that instant.
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{ClassifyLayer, Fleet, FleetLimitLayer, ProviderSettings, RetryAfterLayer, TokenLimitLayer};
//!
//! let llm = Fleet::local().configure("llm", ProviderSettings::new().tokens_per_minute(200_000))?;
//! let service = ServiceBuilder::new()
//!     .layer(RetryAfterLayer::new(&llm))
//!     .layer(TokenLimitLayer::new(&llm))
//!     .layer(FleetLimitLayer::new(&llm))
//!     .layer(ClassifyLayer::new(&llm))
//!     .service(service_fn(|_: http::Request<String>| async { Ok::<_, std::io::Error>(http::Response::new(String::new())) }));
//! # let _ = service;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```
//!
//! For services that are not HTTP, and where somebody can count:
//!
//! ```
//! use std::error::Error;
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{Fleet, ProviderSettings, TokenLimitLayer, usage::of_reply};
//! use tower_herd::{Kind, Signal, classify_fn};
//!
//! let embed = Fleet::local().configure("embed", ProviderSettings::new().tokens_per_minute(1_000_000))?;
//! let estimate = |texts: &String| texts.len() as u64 / 3;
//! let used = of_reply(|reply: &(Vec<f32>, u64)| Some(reply.1));
//! let classify = classify_fn(|outcome: Result<&(Vec<f32>, u64), &(dyn Error + 'static)>| {
//!     Signal::new(if outcome.is_ok() { Kind::Success } else { Kind::Failed })
//! });
//! let service = ServiceBuilder::new()
//!     .layer(TokenLimitLayer::with(&embed, estimate, used).classify(classify))
//!     .service(service_fn(|text: String| async move { Ok::<_, std::io::Error>((vec![0.5], text.len() as u64)) }));
//! # let _ = service;
//! # Ok::<(), tower_herd::SettingsError>(())
//! ```

mod estimate;
pub mod future;
mod layer;
mod service;

pub use estimate::{ByBytes, DeclaredTokens, EstimateTokens, TokenEstimate};
pub use future::{ResponseFuture, TokenReserve};
pub use layer::TokenLimitLayer;
pub use service::TokenLimit;
