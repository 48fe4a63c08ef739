//! reqwest-retry 0.9.1 on each rung of a chain.

use async_trait::async_trait;
use http::Extensions;
use http_body_util::BodyExt;
use reqwest::{Request, Response};
use reqwest_middleware::{ClientBuilder, ClientWithMiddleware, Error, Middleware, Next};
use reqwest_retry::policies::ExponentialBackoff;
use reqwest_retry::{DefaultRetryableStrategy, RetryTransientMiddleware, Retryable, RetryableStrategy};
use tower::ServiceExt;

use super::super::{Client, Policy, SimRequest, SimResponse, TaskInfo, Upstream, World, erase};
use crate::BoxError;
use crate::provider::{CallError, Caller};
use crate::scenario::Settings;

/// Three retries a rung by the crate's own middleware, policy and jitter, then the next rung.
#[derive(Clone, Copy, Debug)]
pub struct ReqwestRetry;

const RETRIES: u32 = 3;

/// The end of the chain: calls the scripted provider instead of the network.
struct Terminal(Upstream);

#[async_trait]
impl Middleware for Terminal {
    async fn handle(
        &self,
        request: Request,
        extensions: &mut Extensions,
        _: Next<'_>,
    ) -> Result<Response, Error> {
        let request = http::Request::<reqwest::Body>::try_from(request).map_err(Error::Reqwest)?;
        let (parts, body) = request.into_parts();
        let body = body.collect().await.map(http_body_util::Collected::to_bytes).map_err(Error::Reqwest)?;
        let mut request = SimRequest::from_parts(parts, body.into());
        if let Some(task) = extensions.get::<TaskInfo>() {
            let caller = Caller { task: Some(task.id), process: Some(task.process), cost: Some(task.cost) };
            request.extensions_mut().insert(caller);
            request.extensions_mut().insert(*task);
        }
        let reply = self.0.clone().oneshot(request).await.map_err(|e| match e.downcast::<CallError>() {
            Ok(e) => Error::middleware(*e),
            Err(e) => Error::middleware(std::io::Error::other(e)),
        })?;
        let (parts, body) = reply.into_parts();
        let bytes = body.collect().await.map(http_body_util::Collected::to_bytes).unwrap_or_default();
        Ok(Response::from(http::Response::from_parts(parts, bytes)))
    }
}

/// The crate's own judgement, and a refused connection is as transient as it is for reqwest.
struct Strategy;

impl RetryableStrategy for Strategy {
    fn handle(&self, result: &Result<Response, Error>) -> Option<Retryable> {
        match result {
            Err(Error::Middleware(e)) if e.downcast_ref::<CallError>().is_some() => {
                Some(Retryable::Transient)
            }
            other => DefaultRetryableStrategy.handle(other),
        }
    }
}

impl Policy for ReqwestRetry {
    fn name(&self) -> &'static str {
        "reqwest-retry"
    }

    fn describe(&self, _: &Settings) -> Option<String> {
        Some(format!(
            "reqwest-retry 0.9.1, RetryTransientMiddleware on each rung with its default exponential policy \
             (1 s doubling, full jitter) and {RETRIES} retries; then the next rung"
        ))
    }

    fn clients(&self, world: &World) -> Result<Vec<Client>, BoxError> {
        let client = |process| {
            let rungs: Vec<ClientWithMiddleware> = world.rungs(process).into_iter().map(rung).collect();
            Client::new(move |request, task| walk(rungs.clone(), request, task))
        };
        Ok(world.processes().map(client).collect())
    }
}

fn rung(service: Upstream) -> ClientWithMiddleware {
    let policy = ExponentialBackoff::builder().build_with_max_retries(RETRIES);
    ClientBuilder::new(reqwest::Client::new())
        .with(RetryTransientMiddleware::new_with_policy_and_strategy(policy, Strategy))
        .with(Terminal(service))
        .build()
}

async fn walk(
    rungs: Vec<ClientWithMiddleware>,
    request: SimRequest,
    task: TaskInfo,
) -> Result<SimResponse, BoxError> {
    let body = request.into_body().collect().await?.to_bytes();
    let mut last: Result<SimResponse, BoxError> = Err("no rung".into());
    for rung in rungs {
        let call = rung.post("http://rung/v1/chat/completions").with_extension(task).body(body.clone());
        last = call.send().await.map(|r| erase(http::Response::from(r))).map_err(Into::into);
        if matches!(&last, Ok(reply) if reply.status().is_success()) {
            break;
        }
    }
    last
}
