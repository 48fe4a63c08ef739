//! hyper-util's client behind the stack, against a server that misbehaves.
//!
//! ```text
//! cargo run --example hyper
//! ```
//!
//! A real server on loopback says 429 and names a wait, says 503, answers too late, or is not there yet. What
//! comes of it is asserted, and told in plain words. It takes a few seconds, most of them the server's waits.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::{TokioExecutor, TokioIo},
};
use std::{
    convert::Infallible,
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{
    net::{TcpListener, TcpSocket},
    time::{Instant, sleep},
};
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Exhausted, Fleet, FleetLimitLayer, JitteredRetryLayer,
    ProviderSettings, Refusal, RetryAfterLayer, Safety, Task, TaskLayer,
};

type Request = http::Request<Full<Bytes>>;

/// The stack: outermost first, the client last. A macro, so that its long type need not be written; a program
/// builds it once, in the one function that needs it.
macro_rules! stack {
    ($provider:expr) => {
        ServiceBuilder::new()
            .layer(TaskLayer::new().deadline(Duration::from_secs(20)))
            .layer(JitteredRetryLayer::new().base(Duration::from_millis(50)))
            .layer(RetryAfterLayer::new($provider))
            .layer(FleetLimitLayer::new($provider))
            .layer(ClassifyLayer::new($provider))
            .layer(AttemptTimeoutLayer::new(Duration::from_millis(500)))
            .service(client())
    };
}

fn client() -> Client<HttpConnector, Full<Bytes>> {
    // hyper-util repeats a request by itself only where its idle connection was closed before it was sent:
    // that multiplies nothing, and needs no switching off.
    Client::builder(TokioExecutor::new()).build_http()
}

/// An unkeyed write, unless it says something else of itself.
fn post(url: &str) -> Result<Request, BoxError> {
    Ok(http::Request::post(url).body(Full::from("{}"))?)
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    // One fleet a process, one provider for each thing with a quota.
    let fleet = Fleet::local();

    println!("The server holds 4 calls at a time. To the first it says: 429, Retry-After: 1.");
    let server = serve(TcpListener::bind("127.0.0.1:0").await?, |n| match n {
        0 => reply(429).header("retry-after", "1"),
        _ => reply(200),
    })?;
    let llm = fleet.configure("llm", ProviderSettings::new().ceiling(4))?;
    let service = stack!(&llm);
    let first = tokio::spawn(service.clone().oneshot(post(&server.url)?));
    while llm.throttled() == 0 {
        sleep(Duration::from_millis(1)).await;
    }
    let others = (0..19).map(|_| Ok(tokio::spawn(service.clone().oneshot(post(&server.url)?))));
    let others = others.collect::<Result<Vec<_>, BoxError>>()?;
    for call in others.into_iter().chain([first]) {
        // The slot is held until the body has been read.
        let body = call.await??.into_body().collect().await?.to_bytes();
        assert_eq!(body, "hello");
    }
    let came = server.came();
    let earliest = came[1].duration_since(came[0]);
    assert!(came.len() == 21 && earliest >= Duration::from_secs(1));
    println!(
        "  20 calls were answered with 21 on the wire; the earliest after the 429 came {earliest:.2?} later.\n"
    );

    println!("A server says 503 to the first call.");
    for (safety, wire) in [(Safety::Costly, 2), (Safety::Once, 1)] {
        let server =
            serve(TcpListener::bind("127.0.0.1:0").await?, |n| reply(if n == 0 { 503 } else { 200 }))?;
        let mut request = post(&server.url)?;
        request.extensions_mut().insert(safety);
        let reply = stack!(&fleet.provider(&format!("{safety:?}"))).oneshot(request).await?;
        assert_eq!(server.came().len(), wire);
        println!("  A request that is {safety:?} got {}, with {wire} on the wire.", reply.status());
    }
    println!("  Nobody knows whether a write that got a 503 was executed: it is not sent twice.\n");

    println!("A server always says 503, and names no wait.");
    let server = serve(TcpListener::bind("127.0.0.1:0").await?, |_| reply(503))?;
    let mut request = post(&server.url)?;
    request.extensions_mut().insert(Safety::Safe);
    let last = stack!(&fleet.provider("down")).oneshot(request).await?;
    let stamp = *last.extensions().get::<Exhausted>().expect("the last of several says so");
    assert_eq!((last.status().as_u16(), stamp.attempts, server.came().len()), (503, 3, 3));
    println!(
        "  After {} attempts the caller gets the server's own reply: {}.\n",
        stamp.attempts,
        last.status()
    );

    println!("A server takes 5 s to answer the first call.");
    let server = serve(TcpListener::bind("127.0.0.1:0").await?, |n| match n {
        0 => reply(200).after(Duration::from_secs(5)),
        _ => reply(200),
    })?;
    let mut request = post(&server.url)?;
    request.extensions_mut().insert(Safety::Safe);
    let start = Instant::now();
    assert_eq!(stack!(&fleet.provider("slow")).oneshot(request).await?.status(), 200);
    assert!(start.elapsed() < Duration::from_secs(3) && server.came().len() == 2);
    println!("  The attempt was cut after 0.5 s, the next one answered: {:.1?} in all.\n", start.elapsed());

    println!("A server is not there yet: connections are refused.");
    let socket = TcpSocket::new_v4()?;
    socket.bind("127.0.0.1:0".parse()?)?;
    let url = format!("http://{}", socket.local_addr()?);
    let mut request = post(&url)?;
    request.extensions_mut().insert(Task::new("invoice-4711").allowance(8));
    let patient = JitteredRetryLayer::new().attempts(8).base(Duration::from_millis(400));
    let restarting = fleet.provider("restarting");
    let call = tokio::spawn(
        ServiceBuilder::new()
            .layer(patient)
            .layer(ClassifyLayer::new(&restarting))
            .service(client())
            .oneshot(request),
    );
    sleep(Duration::from_millis(150)).await;
    let server = serve(socket.listen(64)?, |_| reply(200))?;
    assert_eq!(call.await??.status(), 200);
    assert_eq!(server.came().len(), 1);
    println!("  Even an unkeyed write is sent again, since nothing was executed: it came once.\n");

    println!("A server asks for a minute, and the next task has 5 s.");
    let server = serve(TcpListener::bind("127.0.0.1:0").await?, |_| reply(429).header("retry-after", "60"))?;
    let later = fleet.provider("later");
    let service = stack!(&later);
    assert_eq!(service.clone().oneshot(post(&server.url)?).await?.status(), 429);
    let mut request = post(&server.url)?;
    request.extensions_mut().insert(Task::new("invoice-4712").deadline_in(Duration::from_secs(5)));
    let error = service.oneshot(request).await.expect_err("it cannot wait so long");
    let refusal = Refusal::find(&*error).expect("a no of our own");
    assert_eq!(server.came().len(), 1);
    println!("  Refused at once, nothing was sent: {refusal}.");
    Ok(())
}

// ------------------------------------------------------------------------------------------- the server

/// What one call is answered with.
struct Reply {
    status: u16,
    header: Option<(&'static str, &'static str)>,
    after: Duration,
}

fn reply(status: u16) -> Reply {
    Reply { status, header: None, after: Duration::ZERO }
}

impl Reply {
    fn header(mut self, name: &'static str, value: &'static str) -> Self {
        self.header = Some((name, value));
        self
    }
    fn after(mut self, time: Duration) -> Self {
        self.after = time;
        self
    }
}

struct Server {
    url: String,
    came: Arc<Mutex<Vec<Instant>>>,
}

impl Server {
    /// When its calls came, by its own clock.
    fn came(&self) -> Vec<Instant> {
        self.came.lock().expect("nobody panics with it").clone()
    }
}

/// Answers the n-th call with `answers(n)`, until the program ends.
fn serve(listener: TcpListener, answers: fn(usize) -> Reply) -> Result<Server, BoxError> {
    let url = format!("http://{}", listener.local_addr()?);
    let came = Arc::new(Mutex::new(Vec::new()));
    let server = Server { url, came: came.clone() };
    let service = hyper::service::service_fn(move |_| {
        let number = {
            let mut came = came.lock().expect("nobody panics with it");
            came.push(Instant::now());
            came.len() - 1
        };
        async move {
            let Reply { status, header, after } = answers(number);
            sleep(after).await;
            let reply = http::Response::builder().status(status);
            let reply = header.into_iter().fold(reply, |reply, (name, value)| reply.header(name, value));
            Ok::<_, Infallible>(reply.body(Full::<Bytes>::from("hello")).expect("headers are valid"))
        }
    });
    tokio::spawn(async move {
        while let Ok((socket, _)) = listener.accept().await {
            let service = service.clone();
            tokio::spawn(async move {
                let builder = hyper_util::server::conn::auto::Builder::new(TokioExecutor::new());
                // A client that hangs up is none of our business.
                builder.serve_connection(TokioIo::new(socket), service).await.ok();
            });
        }
    });
    Ok(server)
}
