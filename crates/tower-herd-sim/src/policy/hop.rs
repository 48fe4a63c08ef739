//! What a stack calls: a provider, or the next stack over a network.

use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Full};
use tokio::time::Instant;
use tower::ServiceExt;
use tower_herd::refusal::error_reply;
use tower_service::Service;

use super::{Client, SimFuture, SimRequest, SimResponse, TaskInfo, erase};
use crate::BoxError;
use crate::provider::{Caller, ProviderService};
use crate::scenario::Settings;

/// One rung as a process calls it; always ready.
#[derive(Clone, Debug)]
pub struct Upstream(To);

#[derive(Clone, Debug)]
enum To {
    Provider(ProviderService),
    Stack { client: Client, deadline: Duration },
}

impl Upstream {
    pub(crate) fn provider(service: ProviderService) -> Self {
        Self(To::Provider(service))
    }

    pub(crate) fn stack(client: Client, settings: &Settings) -> Self {
        Self(To::Stack { client, deadline: settings.deadline })
    }
}

impl Service<SimRequest> for Upstream {
    type Response = SimResponse;
    type Error = BoxError;
    type Future = SimFuture;

    fn poll_ready(&mut self, _: &mut Context<'_>) -> Poll<Result<(), BoxError>> {
        Poll::Ready(Ok(()))
    }

    fn call(&mut self, request: SimRequest) -> SimFuture {
        match &self.0 {
            To::Provider(service) => {
                let call = service.clone().oneshot(request);
                Box::pin(async move { Ok(erase(call.await?)) })
            }
            To::Stack { client, deadline } => {
                let (client, deadline) = (client.clone(), *deadline);
                Box::pin(async move { Ok(served(&client, request, deadline).await) })
            }
        }
    }
}

/// A server that answers with what its own client got. Only what HTTP carries crosses: extensions do
/// not, and an error becomes a reply (a refusal says when to come back; else 502, or 504 after a timeout). The
/// server gives its client as long as a task gets; when the caller hangs up, it stops.
async fn served(client: &Client, request: SimRequest, deadline: Duration) -> SimResponse {
    let (mut parts, body) = request.into_parts();
    let known = std::mem::take(&mut parts.extensions);
    let mut request = Request::from_parts(parts, body);
    // Who calls is written down for the account at the providers; no policy decides by it.
    if let Some(caller) = known.get::<Caller>() {
        request.extensions_mut().insert(*caller);
    }
    let Some(task) = known.get::<TaskInfo>() else {
        return plain(StatusCode::BAD_REQUEST, "no task");
    };
    let task = TaskInfo { deadline: Instant::now() + deadline, ..*task };
    request.extensions_mut().insert(task);
    match client.call(request, task).await {
        Ok(mut reply) => {
            reply.extensions_mut().clear();
            reply
        }
        Err(e) => erase(error_reply::<Full<Bytes>>(&*e)),
    }
}

fn plain(status: StatusCode, text: &'static str) -> SimResponse {
    let mut reply =
        Response::new(Full::new(Bytes::from_static(text.as_bytes())).map_err(Into::into).boxed_unsync());
    *reply.status_mut() = status;
    reply
}

#[cfg(test)]
mod tests {
    use super::*;
    use tower_herd::{Refusal, RefusalKind};

    #[derive(Clone)]
    struct Secret;

    async fn answer(client: Client) -> SimResponse {
        let task = TaskInfo {
            id: 7,
            agent: 0,
            process: 0,
            deadline: Instant::now() + Duration::from_secs(1),
            cost: 1.0,
        };
        let mut request = Request::new(Full::new(Bytes::from_static(b"{}")));
        request.headers_mut().insert("x-said", http::HeaderValue::from_static("yes"));
        request.extensions_mut().insert(task);
        request.extensions_mut().insert(Secret);
        served(&client, request, Duration::from_secs(60)).await
    }

    #[tokio::test(start_paused = true)]
    async fn only_what_http_carries_crosses() {
        let client = Client::new(|request: SimRequest, task: TaskInfo| async move {
            assert!(request.extensions().get::<Secret>().is_none());
            assert_eq!(request.headers()["x-said"], "yes");
            assert_eq!((task.id, task.deadline - Instant::now()), (7, Duration::from_secs(60)));
            let mut reply = plain(StatusCode::OK, "fine");
            reply.extensions_mut().insert(Secret);
            Ok(reply)
        });
        let reply = answer(client).await;
        assert_eq!(reply.status(), 200);
        assert!(reply.extensions().get::<Secret>().is_none());
    }

    #[tokio::test(start_paused = true)]
    async fn errors_become_replies() {
        let reply = answer(Client::new(|_, _| async { Err("broken".into()) })).await;
        assert_eq!(reply.status(), 502);
        let reply = answer(Client::new(|_, _| async {
            let at = Some(Instant::now() + Duration::from_secs(3));
            Err(Refusal::new(RefusalKind::Paused, "it asked for a pause", "p".into(), at).into())
        }))
        .await;
        assert_eq!((reply.status().as_u16(), &reply.headers()["retry-after"]), (429, &"3".parse().unwrap()));
    }
}
