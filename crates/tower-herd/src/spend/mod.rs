//! The spend cap: what one task may cost.
//!
//! # Why
//!
//! A check of the bill after each call stops nobody in time: five calls that start together all see the same
//! balance, and four of five went through a cap that held three (BerriAI/litellm#34732). A budget that every
//! sub-agent opens for itself is none: 2.00 of 1.25 (nodetool-ai/nodetool#5489). And an agent in a loop with
//! a tool that fails spends until somebody wakes up: 18.7 million tokens in five hours
//! (NousResearch/hermes-agent#91713). So each call reserves what it may cost *before* it is sent, out of an
//! [`Allowance`] that all calls, retries, failovers and children of a task share, and settles when its reply
//! tells what it did cost.
//!
//! The unit is yours: dollars by [`Prices`], tokens, credits; [`Amount`] counts millionths of it, exactly.
//!
//! # What is charged
//!
//! | when | the call |
//! |---|---|
//! | it is about to be sent | its estimate is reserved, or it is refused |
//! | its reply tells what it cost, in a stream at its end | that is charged, whole, if more than reserved: later calls are refused until the debt is paid |
//! | it was not executed ([`Executed::No`](crate::Executed)): a 429, no connection, a refusal of a layer further in | nothing |
//! | dropped before it was sent, in a queue of ours | nothing |
//! | no reply came: timed out, dropped, broken | the estimate: it may have been billed (llm-exe#797) |
//! | its body was dropped or broke before the last word | the estimate, or what it had used so far, if that is more |
//!
//! A retry and a hop to another rung are calls of their own, and are summed with the calls before
//! (BerriAI/litellm#33273). How the reply tells what it cost is the [meter](crate::usage)'s business.
//!
//! # Where it stands
//!
//! Once for each rung, since prices differ: inside the [readmission](crate::readmission), so that nothing is
//! reserved for a task that is not let back yet, and outside the [breaker](crate::breaker) and all that queues.
//! Further out, around the retries, it would reserve once and pay several times; inside the pause or the limit it
//! would refuse only after the call had waited.
//!
//! # Errors
//!
//! A [`Refusal`](crate::Refusal) of kind [`Spend`](crate::RefusalKind::Spend): it is terminal, has no instant
//! at which it ends, and is sent again by nobody (topoteretes/cognee#4321 retried it like a 429). The caller
//! that wants to go on makes the allowance larger ([`Allowance::top_up`]), and asks again.
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{Fleet, SpendLayer, Task, spend::{Amount, Prices}, usage::llm};
//!
//! let provider = Fleet::local().provider("llm");
//! let prices = Prices::new("2.50".parse()?, "10".parse()?).cached("1.25".parse()?);
//! // The caller says what may come out at most; the prompt is guessed by its length.
//! let estimate = move |request: &http::Request<String>| prices.at_most(request.body().len() as u64 / 3, 1_000);
//! let service = ServiceBuilder::new()
//!     .layer(SpendLayer::new(&provider, estimate, llm(prices)).per_task(Amount::units(2)))
//!     .service(service_fn(|_: http::Request<String>| async {
//!         Ok::<_, std::io::Error>(http::Response::new(String::new()))
//!     }));
//!
//! let task = Task::new("report").spend("1.25".parse()?);
//! let research = task.child("research"); // spends the same 1.25
//! let drafts = task.child("drafts").spend("0.50".parse()?); // no more than 0.50 of it
//! # let _ = (service, research, drafts);
//! # Ok::<(), tower_herd::spend::AmountError>(())
//! ```
//!
//! For services that are not HTTP:
//!
//! ```
//! use std::error::Error;
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{Fleet, Kind, Signal, SpendLayer, classify_fn, usage::of_reply};
//! use tower_herd::spend::{Allowance, Amount};
//!
//! struct Page { credits: u64 }
//! let scraper = Fleet::local().provider("scraper");
//! let month = Allowance::new(Amount::units(10_000)); // credits; topped up by a job
//! let classify = classify_fn(|outcome: Result<&Page, &(dyn Error + 'static)>| match outcome {
//!     Ok(_) => Signal::new(Kind::Success),
//!     Err(error) => tower_herd::classify::signal_of_error(error),
//! });
//! let used = of_reply(|page: &Page| Some(Amount::units(page.credits)));
//! let service = ServiceBuilder::new()
//!     .layer(SpendLayer::new(&scraper, |_: &String| Amount::units(5), used).within(&month).classify(classify))
//!     .service(service_fn(|_: String| async { Ok::<_, std::io::Error>(Page { credits: 1 }) }));
//! # let _ = service;
//! ```

mod allowance;
mod amount;
mod charge;
pub mod future;
mod layer;
mod prices;
mod service;

pub use allowance::{Allowance, Reservation};
pub use amount::{Amount, AmountError};
pub use charge::Charge;
pub use future::ResponseFuture;
pub use layer::SpendLayer;
pub use prices::Prices;
pub use service::Spend;

/// What a request may cost, before it is sent: a closure. It should be the most that it can cost, or what goes
/// beyond is charged afterwards.
pub trait Estimate<Req> {
    /// The estimate for this request.
    fn estimate(&self, request: &Req) -> Amount;
}

impl<Req, F: Fn(&Req) -> Amount> Estimate<Req> for F {
    #[inline]
    fn estimate(&self, request: &Req) -> Amount {
        self(request)
    }
}
