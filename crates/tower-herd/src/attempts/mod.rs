//! What stacks above and below are told of attempts, so that their retries do not multiply.
//!
//! # Why
//!
//! A client, a service and the service behind it, each with a careful stack of four attempts, send a dead
//! provider 4 * 4 * 4 = 64 calls for one request (BerriAI/litellm#7130: 12 where 3 were meant;
//! HKUDS/nanobot#2759, livekit/agents#5335). Inside one process a [`Task`](crate::Task) prevents
//! this: all layers draw on one allowance. Between processes three things have to be said on the wire, and
//! these two layers say and read them:
//!
//! | direction | what | as |
//! |---|---|---|
//! | request | calls made before this one | `grpc-previous-rpc-attempts` (gRFC A6), `x-envoy-attempt-count` (from 1), `made` of our own header |
//! | request | failed calls that are left, time that is left | `left` and `ms` of our own header; read also: `grpc-timeout`, `x-envoy-expected-rq-timeout-ms` |
//! | reply | "given up: do not send it again" | `x-should-retry: false`, for gRPC `grpc-retry-pushback-ms: -1` |
//!
//! Our own header is `tower-herd-attempts: made=1, left=2, ms=15000`. What it says is taken in by minimum:
//! allowance and time never grow on their way inward, through any number of services. A mark on a reply is
//! seen by every retry layer of this crate ([`Classify::exhausted`](crate::Classify::exhausted)): who
//! sees it neither sends again nor counts the request for its retry budget. The SDKs of OpenAI and Anthropic
//! obey `x-should-retry`, gRPC's own retries the pushback.
//!
//! # Where they stand
//!
//! | layer | stands | what breaks elsewhere |
//! |---|---|---|
//! | [`AttemptsLayer`], the client's side | at each provider, between [`FleetLimitLayer`](crate::FleetLimitLayer) and [`ClassifyLayer`](crate::ClassifyLayer) | outside the retry layer all attempts are the first; outside the limit the time told is the one before the queue |
//! | [`IncomingAttemptsLayer`], the server's side | around the handlers, inside [`TaskLayer`](crate::TaskLayer) if there is one | outside it, the task is started without what the request says |
//!
//! Left out, each service retries as if it were alone. What retries besides us (SDKs, meshes, HTTP
//! clients) and how it is switched off: [the guide](crate::guide::retries). Where a reply tells that
//! something in between has repeated our call, [`Event::InnerRetries`](crate::observe::Event::InnerRetries)
//! names the provider, once a minute.
//!
//! # What they cost
//!
//! The client's layer writes nothing on a first call, unless it is told to ([`AttemptsLayer::tell_first`])
//! or its task came with headers of its own: once told, told on. So the happy path allocates nothing; a
//! repetition allocates its header values. The server's layer starts a task for each request that has
//! none.
//!
//! # Trust
//!
//! Headers come from anybody. They can only narrow what their own request may do: fewer attempts, less
//! time, no payment into a retry budget. Numbers are capped (1000 calls, a day), and what cannot be read says
//! nothing.
//!
//! # Examples
//!
//! A client:
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{AttemptsLayer, ClassifyLayer, Fleet, FleetLimitLayer, JitteredRetryLayer, TaskLayer};
//!
//! # let client = service_fn(|_: http::Request<String>| async {
//! #     Ok::<_, std::io::Error>(http::Response::new(http_body_util::Full::<bytes::Bytes>::default()))
//! # });
//! let search = Fleet::local().provider("search");
//! let service = ServiceBuilder::new()
//!     .layer(TaskLayer::new())
//!     .layer(JitteredRetryLayer::new())
//!     .layer(FleetLimitLayer::new(&search))
//!     .layer(AttemptsLayer::new(&search).tell_first(true)) // a service of our own: it hears of the deadline
//!     .layer(ClassifyLayer::new(&search))
//!     .service(client);
//! # let _ = service;
//! ```
//!
//! A server. Its handler passes the task on to the calls that it makes for the request; then the reply is
//! marked even where it is made anew:
//!
//! ```
//! use tower::{ServiceBuilder, service_fn};
//! use tower_herd::{BoxError, HasTask, IncomingAttemptsLayer, refusal::error_reply};
//!
//! # async fn ask(_: http::Request<String>) -> Result<http::Response<String>, BoxError> { Ok(http::Response::default()) }
//! let server = ServiceBuilder::new().layer(IncomingAttemptsLayer::new()).service_fn(
//!     |request: http::Request<String>| async move {
//!         let mut inner = http::Request::new(String::new());
//!         if let Some(task) = request.task() {
//!             inner.set_task(task.clone());
//!         }
//!         // `ask` is a client's stack. Its refusals become 429 or 503 with their `Retry-After`.
//!         let reply = ask(inner).await.unwrap_or_else(|error| error_reply(&*error));
//!         Ok::<_, std::convert::Infallible>(reply)
//!     },
//! );
//! # let _ = server;
//! ```

pub mod future;
mod incoming;
mod layer;
mod service;
mod told;

#[cfg(feature = "herd")]
pub(crate) use layer::replied_to_first;

pub use incoming::{IncomingAttempts, IncomingAttemptsLayer};
pub use layer::AttemptsLayer;
pub use service::Attempts;
#[cfg(feature = "herd")]
pub(crate) use told::notice;
pub use told::{HEADER, MOST_CALLS, MOST_TIME, Told};
