//! reqwest under herd control: any tower layer inside a reqwest-middleware chain, and reqwest as a
//! service of http types.
//!
//! There are two places for a stack. **Inside the client** it is one more middleware; the code that
//! sends requests does not change at all. **Around the client** it is a tower service, for code that
//! speaks http types anyway. The layers are the same in both.
//!
//! # A stack inside the client
//!
//! [`TowerMiddleware`] takes a layer, or a stack of them:
//!
//! ```no_run
//! use reqwest_middleware::ClientBuilder;
//! use tower::ServiceBuilder;
//! use tower_herd::{
//!     AttemptTimeoutLayer, ClassifyLayer, Fleet, FleetLimitLayer, JitteredRetryLayer, RetryAfterLayer, TaskLayer,
//! };
//! use tower_herd_reqwest::{Reusable, TowerMiddleware};
//!
//! # async fn run() -> Result<(), reqwest_middleware::Error> {
//! let llm = Fleet::local().provider("llm");
//! let stack = ServiceBuilder::new()
//!     .layer(TaskLayer::new())
//!     .layer(JitteredRetryLayer::new().resend(Reusable::new(64 << 10)))
//!     .layer(RetryAfterLayer::new(&llm))
//!     .layer(FleetLimitLayer::new(&llm))
//!     .layer(ClassifyLayer::new(&llm))
//!     .layer(AttemptTimeoutLayer::default())
//!     .into_inner();
//! let client = ClientBuilder::new(reqwest::Client::new()).with(TowerMiddleware::new(stack)).build();
//!
//! let reply = client.post("https://llm.example/v1/chat").body("{}").send().await?;
//! # let _ = reply;
//! # Ok(())
//! # }
//! ```
//!
//! What the layers want to know of a request goes into the chain's extensions:
//!
//! ```no_run
//! use tower_herd::{Safety, Task};
//!
//! # async fn run(client: reqwest_middleware::ClientWithMiddleware) -> Result<(), reqwest_middleware::Error> {
//! let reply = client
//!     .post("https://llm.example/v1/chat")
//!     .with_extension(Task::new("invoice-4711").caller("agent-7"))
//!     .with_extension(Safety::Costly) // a completion: repeatable, at a price
//!     .body("{}")
//!     .send()
//!     .await?;
//! # let _ = reply;
//! # Ok(())
//! # }
//! ```
//!
//! A refusal is found in the error, and says until when:
//!
//! ```no_run
//! use tower_herd::Refusal;
//!
//! # async fn run(client: reqwest_middleware::ClientWithMiddleware) {
//! match client.get("https://llm.example/v1/models").send().await {
//!     Ok(reply) => println!("{}", reply.status()),
//!     Err(error) => match Refusal::find(&error) {
//!         Some(refusal) => println!("nothing was sent; come back in {:?}", refusal.wait()),
//!         None if error.is_timeout() => println!("sent, but no answer in time"),
//!         None => println!("{error}"),
//!     },
//! }
//! # }
//! ```
//!
//! # A stack around the client
//!
//! [`HttpService`] makes a service of `reqwest::Client` or of a whole `ClientWithMiddleware`;
//! [`IntoReqwest`] is the way back to a `reqwest::Response`.
//!
//! ```no_run
//! use tower::{ServiceBuilder, ServiceExt};
//! use tower_herd::{ClassifyLayer, Fleet, FleetLimitLayer, RetryAfterLayer, TaskLayer};
//! use tower_herd_reqwest::{HttpService, IntoReqwest};
//!
//! # async fn run() -> Result<(), tower_herd::BoxError> {
//! let llm = Fleet::local().provider("llm");
//! let service = ServiceBuilder::new()
//!     .layer(TaskLayer::new())
//!     .layer(RetryAfterLayer::new(&llm))
//!     .layer(FleetLimitLayer::new(&llm))
//!     .layer(ClassifyLayer::new(&llm))
//!     .service(HttpService::new(reqwest::Client::new()));
//!
//! let request = http::Request::post("https://llm.example/v1/chat").body(reqwest::Body::from("{}"))?;
//! let reply: reqwest::Response = service.clone().oneshot(request).await?.into_reqwest();
//! println!("{} from {}", reply.status(), reply.url());
//! # Ok(())
//! # }
//! ```
//!
//! # Switch off the retries below and beside
//!
//! Three layers of four attempts are 64 calls. One place retries; the others are switched off.
//!
//! * **reqwest** repeats by itself what a server refused by protocol (HTTP/2 `REFUSED_STREAM`, a
//!   graceful `GOAWAY`), twice at most and without a budget. That proves "not executed" and does no
//!   harm but that nobody sees it: those calls pass under the ceiling and are in no statistic.
//!   `reqwest::retry::never()` ends it; the layers then see the error and decide. A policy of your own
//!   (`reqwest::retry::for_host`) belongs out in any case: with two retries a request it makes three
//!   calls of each attempt.
//! * **Redirects** are calls too. reqwest follows up to ten inside one attempt. Where the provider
//!   does not redirect, `Policy::none()` makes a surprise visible.
//! * **reqwest-retry**: take `RetryTransientMiddleware` out of the chain. Outside of a
//!   [`TowerMiddleware`] it starts a new task for each of its attempts, with a full allowance; inside,
//!   all its calls go out on one admission. In both places it does not know the provider's
//!   `Retry-After`, and answers a stream with an error (reqwest-middleware#44).
//! * hyper-util, below reqwest, sends a request again on a fresh connection if the pooled one was
//!   closed before anything was written. reqwest has no switch for it, and none is needed.
//!
//! ```
//! let client = reqwest::Client::builder()
//!     .retry(reqwest::retry::never())
//!     .redirect(reqwest::redirect::Policy::none())
//!     .build()?;
//! # let _ = client;
//! # Ok::<(), reqwest::Error>(())
//! ```
//!
//! # What is kept, and what is lost
//!
//! | of the | kept | lost or changed |
//! |---|---|---|
//! | request | method, URL, headers, HTTP version | the URL's fragment, once a layer changes the URL |
//! | timeout | `RequestBuilder::timeout`, until the body's end | it is **for each attempt**: three attempts may take three times as long. The whole is bounded by the task's deadline |
//! | request body | bytes and text stay reusable when the layers pass them on or use [`clone_request`], as [`Reusable`] does: **307 and 308** are followed with the body | a layer that wraps the body (a replaying retry) makes it a stream: reqwest then returns the 307 or 308 itself, as it does for every stream |
//! | a stream as body | sent as it comes, its length if it knows it | it cannot be cloned, so a layer that only clones sends it once, and the first real reply is returned |
//! | response | status, headers, URL, extensions (the peer's address), trailers | |
//! | response body | streams; guards that layers hang on it live until it ends or is dropped | boxed once more |
//! | errors | reqwest's: `is_timeout`, `is_connect`, `status` go on working; other middlewares': unchanged | a layer's own: [`reqwest_middleware::Error::Middleware`] with a [`LayerError`](error::LayerError); tower's `Elapsed` is not `is_timeout()` |
//! | chain's extensions | into the layers and on to the middlewares inside; back to the caller on success, error, refusal and cancel | a [`Task`](tower_herd::Task) or [`Safety`](tower_herd::Safety) that the layers put in stays inside |
//!
//! With several attempts each finds the extensions that the one before it left, under those of its own
//! request: where a layer clones the request, an entry that the caller gave is back at the caller's
//! value, and entries that are new stay. Attempts that run side by side start from the same, and the
//! last to end is what the caller sees; one that is dropped leaves no trace.
//!
//! # What a connect error proves
//!
//! A connection that never came to be carried no request, so the call was not executed and even a
//! write may be sent again. `reqwest::Error::is_connect()` says so, and so does the chain of sources,
//! for classifiers that know nothing of reqwest: `reqwest::Error` → `hyper_util`'s legacy error
//! (`is_connect()`) → the connector's error → `io::Error` of kind `ConnectionRefused`. Names that do
//! not resolve, connect timeouts and TLS failures have the second link but not the last.

#![forbid(unsafe_code)]
#![warn(missing_docs)]

mod convert;
pub mod error;
mod middleware;
mod next;
mod resend;
mod service;

pub use convert::{IntoReqwest, clone_body, clone_request, into_http};
pub use middleware::TowerMiddleware;
pub use next::{NextFuture, NextService};
pub use resend::{Kept, Reusable};
pub use service::{ChainFuture, ClientFuture, HttpClient, HttpService};
