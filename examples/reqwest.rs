//! reqwest behind the stack: around the client, and inside a reqwest-middleware chain.
//!
//! ```text
//! cargo run --example reqwest
//! ```
//!
//! Two real servers on loopback. One says 503, 429 with a wait, or redirects; the other stands in for it. What
//! comes of it is asserted, and told in plain words.

use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::rt::{TokioExecutor, TokioIo};
use reqwest::Body;
use reqwest_middleware::ClientBuilder;
use std::{
    sync::{Arc, Mutex},
    time::Duration,
};
use tokio::{net::TcpListener, time::Instant};
use tower::{ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, Fleet, FleetLimitLayer, HashedFailoverLayer, HttpClassify,
    JitteredRetryLayer, RatioBudget, Refusal, RetryAfterLayer, Safety, Task, TaskLayer, failover::Rung,
};
use tower_herd_reqwest::{HttpService, IntoReqwest, Reusable, TowerMiddleware};

/// The layers of one provider. A macro, so that their long type need not be written.
macro_rules! gates {
    ($provider:expr) => {
        ServiceBuilder::new()
            .layer(RetryAfterLayer::new($provider))
            .layer(FleetLimitLayer::new($provider))
            .layer(ClassifyLayer::new($provider))
            .layer(AttemptTimeoutLayer::new(Duration::from_secs(5)))
            .into_inner()
    };
}

/// Bodies that are bytes or text stay what they are; streams are recorded, up to 64 KiB.
fn retry() -> JitteredRetryLayer<HttpClassify, Reusable> {
    JitteredRetryLayer::new().base(Duration::from_millis(50)).resend(Reusable::new(64 << 10))
}

/// reqwest repeats what an HTTP/2 server refused, by itself. Here the stack does that, and counts it.
fn client() -> reqwest::Result<reqwest::Client> {
    reqwest::Client::builder().retry(reqwest::retry::never()).build()
}

#[tokio::main]
async fn main() -> Result<(), BoxError> {
    let fleet = Fleet::local();

    println!("1. The stack around the client: reqwest as a service of http types.");
    let server = serve(|n, _| if n == 0 { reply(503) } else { reply(200) }).await?;
    let search = fleet.provider("search");
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry())
        .layer(gates!(&search))
        .service(HttpService::new(client()?));
    let mut request = http::Request::post(&server.url).body(Body::from("a question"))?;
    // A completion: it may be repeated, at a price.
    request.extensions_mut().insert(Safety::Costly);
    let answer: reqwest::Response = service.oneshot(request).await?.into_reqwest();
    assert_eq!(answer.text().await?, "a question");
    assert_eq!(server.bodies(), ["a question", "a question"]);
    println!("   After a 503 the same question went out again, and was answered.\n");

    println!("2. The stack inside the client: the code that sends requests does not change.");
    let server =
        serve(|n, _| if n == 0 { reply(429).header("retry-after", "1") } else { reply(200) }).await?;
    let stack = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry())
        .layer(gates!(&fleet.provider("mail")))
        .into_inner();
    let mail = ClientBuilder::new(client()?).with(TowerMiddleware::new(stack)).build();
    let start = Instant::now();
    assert_eq!(mail.post(&server.url).body("a letter").send().await?.text().await?, "a letter");
    assert!(start.elapsed() >= Duration::from_secs(1));
    assert_eq!(server.bodies().len(), 2);
    println!("   \"429, Retry-After: 1\" cost {:.1?}; no line of the caller knows of it.\n", start.elapsed());

    println!("3. A redirect that keeps the body, under the same stack.");
    let there = serve(|_, _| reply(200)).await?;
    let here = serve(|_, path| reply(308).header("location", path)).await?;
    // The path says where to.
    let url = format!("{}/?{}", here.url, there.url);
    let moved = mail.post(&url).with_extension(Safety::Costly).body("a parcel").send().await?;
    assert_eq!(moved.url().as_str(), format!("{}/", there.url));
    assert_eq!(moved.text().await?, "a parcel");
    println!("   The body was not made a stream on the way, so reqwest could send it on.\n");

    println!("4. A ladder of two servers inside the client; the first asks for a minute.");
    let busy = serve(|_, _| reply(429).header("retry-after", "60")).await?;
    let free = serve(|_, _| reply(200)).await?;
    let (a, b) = (fleet.provider("own-gpu"), fleet.provider("vendor"));
    // At most a tenth of the calls of each provider are repetitions.
    let budget = RatioBudget::default();
    let ladder = HashedFailoverLayer::new([
        Rung::new(&a, gates!(&a)).map(to(&busy.url)?),
        Rung::new(&b, gates!(&b)).tier(1).paid().map(to(&free.url)?),
    ])?
    .resend(Reusable::new(64 << 10))
    .budget(&budget);
    let stack = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry().budget(budget))
        .layer(ladder)
        .into_inner();
    let llm = ClientBuilder::new(client()?).with(TowerMiddleware::new(stack)).build();
    for n in 0..5 {
        let task = Task::new(n).caller("agent-7");
        let request = llm.post("http://ladder.invalid/").with_extension(task).body(n.to_string());
        let answer = request.send().await?;
        assert_eq!(answer.url().as_str(), format!("{}/", free.url));
    }
    assert_eq!((busy.bodies().len(), free.bodies().len()), (1, 5));
    println!("   5 tasks were done by the second server. The first was asked once, and then left alone.\n");

    println!("5. No room for the task: a refusal, found in the chain's own error.");
    let stack = ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(Duration::from_secs(5)))
        .layer(gates!(&a))
        .into_inner();
    let direct = ClientBuilder::new(client()?).with(TowerMiddleware::new(stack)).build();
    let error = direct.get(&busy.url).send().await.expect_err("it is paused for a minute");
    let refusal = Refusal::find(&error).expect("a no of our own");
    assert_eq!(busy.bodies().len(), 1);
    println!("   {refusal}.");
    Ok(())
}

/// Where the requests of a rung go.
fn to(
    url: &str,
) -> Result<impl Fn(http::Request<Body>) -> http::Request<Body> + Send + Sync + use<>, BoxError> {
    let uri: http::Uri = url.parse()?;
    Ok(move |mut request: http::Request<Body>| {
        *request.uri_mut() = uri.clone();
        request
    })
}

// ------------------------------------------------------------------------------------------ the servers

/// What one call is answered with; the body is that of the request.
struct Reply {
    status: u16,
    header: Option<(&'static str, String)>,
}

fn reply(status: u16) -> Reply {
    Reply { status, header: None }
}

impl Reply {
    fn header(mut self, name: &'static str, value: impl Into<String>) -> Self {
        self.header = Some((name, value.into()));
        self
    }
}

struct Server {
    url: String,
    bodies: Arc<Mutex<Vec<String>>>,
}

impl Server {
    /// The bodies that came, call by call.
    fn bodies(&self) -> Vec<String> {
        self.bodies.lock().expect("nobody panics with it").clone()
    }
}

/// Answers the n-th call with `answers(n, query)`, until the program ends.
async fn serve(answers: fn(usize, &str) -> Reply) -> Result<Server, BoxError> {
    let listener = TcpListener::bind("127.0.0.1:0").await?;
    let url = format!("http://{}", listener.local_addr()?);
    let bodies = Arc::new(Mutex::new(Vec::new()));
    let server = Server { url, bodies: bodies.clone() };
    let service = hyper::service::service_fn(move |request: http::Request<hyper::body::Incoming>| {
        let bodies = bodies.clone();
        async move {
            let query = request.uri().query().unwrap_or_default().to_owned();
            let body = request.into_body().collect().await?.to_bytes();
            let number = {
                let mut bodies = bodies.lock().expect("nobody panics with it");
                bodies.push(String::from_utf8_lossy(&body).into_owned());
                bodies.len() - 1
            };
            let Reply { status, header } = answers(number, &query);
            let reply = http::Response::builder().status(status);
            let reply = header.into_iter().fold(reply, |reply, (name, value)| reply.header(name, value));
            Ok::<_, hyper::Error>(reply.body(Full::<Bytes>::new(body)).expect("headers are valid"))
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
