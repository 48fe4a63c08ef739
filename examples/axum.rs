//! A gateway made with axum: what it is asked it asks a provider, through a whole stack, and its caller learns
//! what that stack knows: how long to wait, and that asking again is of no use.
//!
//! ```sh
//! cargo run --example axum
//! ```
//!
//! It starts a provider that fails in turns, the gateway, and a client, and prints what the client sees.

use axum::{Extension, Router, body::Body, extract::State, response::Response, routing::get};
use bytes::Bytes;
use http_body_util::Empty;
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use std::{
    sync::atomic::{AtomicU32, Ordering},
    time::Duration,
};
use tokio::net::TcpListener;
use tower::{ServiceBuilder, ServiceExt, util::BoxCloneSyncService};
use tower_herd::{
    AttemptTimeoutLayer, AttemptsLayer, BoxError, ClassifyLayer, Fleet, FleetLimitLayer, HasTask,
    IncomingAttemptsLayer, JitteredRetryLayer, RetryAfterLayer, Task, TaskLayer, refusal::error_reply,
};

type Request = http::Request<Empty<Bytes>>;
type Stack = BoxCloneSyncService<Request, Response, BoxError>;

/// Made once, and cloned for each request: the provider and the budget are shared.
fn stack() -> Stack {
    let provider = Fleet::local().provider("search");
    let client: Client<HttpConnector, Empty<Bytes>> = Client::builder(TokioExecutor::new())
        .retry_canceled_requests(false) // one layer retries
        .build_http();
    let stack = ServiceBuilder::new()
        .layer(JitteredRetryLayer::new().base(Duration::from_millis(50)))
        .layer(RetryAfterLayer::new(&provider))
        .layer(FleetLimitLayer::new(&provider))
        .layer(AttemptsLayer::new(&provider))
        .layer(ClassifyLayer::new(&provider))
        .layer(AttemptTimeoutLayer::new(Duration::from_secs(10)))
        .service(client)
        .map_response(|reply| reply.map(Body::new));
    BoxCloneSyncService::new(stack)
}

/// The task comes from `IncomingAttemptsLayer`: handed on, it brings the caller's deadline and attempts along,
/// and lets the layer see that they were used up.
async fn search(
    State((stack, url)): State<(Stack, String)>,
    Extension(task): Extension<Task>,
) -> Result<String, Response> {
    let mut request = Request::new(Empty::new());
    *request.uri_mut() = url.parse().expect("our own");
    request.set_task(task);
    // A refusal becomes 429 or 503 with its wait, other errors 502 or 504.
    let reply = stack.oneshot(request).await.map_err(|error| error_reply(&*error))?;
    if !reply.status().is_success() {
        return Err(reply);
    }
    let hits = axum::body::to_bytes(reply.into_body(), 1 << 20).await;
    Ok(format!("found: {}", String::from_utf8_lossy(&hits.unwrap_or_default())))
}

/// Works, fails once, works, is down for three calls, and then says "not now".
async fn provider() -> Response {
    static CALLS: AtomicU32 = AtomicU32::new(0);
    let (status, wait) = match CALLS.fetch_add(1, Ordering::Relaxed) {
        0 | 2 => (200, None),
        1 | 3..6 => (500, None),
        _ => (429, Some("120")),
    };
    let mut reply = Response::new(Body::from("a herd"));
    *reply.status_mut() = http::StatusCode::from_u16(status).expect("a status");
    if let Some(wait) = wait {
        reply.headers_mut().insert("retry-after", http::HeaderValue::from_static(wait));
    }
    reply
}

async fn serve(app: Router) -> Result<String, BoxError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}/", listener.local_addr()?);
    tokio::spawn(axum::serve(listener, app).into_future());
    Ok(url)
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let provider = serve(Router::new().route("/", get(provider))).await?;
    // The last layer of a router is its outermost: a task first, then what the request says of it.
    let gateway = Router::new()
        .route("/", get(search))
        .with_state((stack(), provider))
        .layer(IncomingAttemptsLayer::new())
        .layer(TaskLayer::new().deadline(Duration::from_secs(20)));
    let gateway = serve(gateway).await?;
    let client: Client<HttpConnector, Empty<Bytes>> = Client::builder(TokioExecutor::new()).build_http();
    for what in [
        "at once",
        "one failure, sent again",
        "three failures: given up, and marked",
        "throttled: not before",
        "paused: nothing sent, not before",
    ] {
        let reply = client.get(gateway.parse()?).await?;
        let header =
            |name: &str| reply.headers().get(name).and_then(|value| value.to_str().ok()).unwrap_or("-");
        println!(
            "{what:40} {}  retry-after: {:4} x-should-retry: {}",
            reply.status(),
            header("retry-after"),
            header("x-should-retry")
        );
    }
    Ok(())
}
