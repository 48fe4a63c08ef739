//! hyper-util's client.

use crate::{
    gaps, gates, ms, provider, refusing, secs,
    server::{Server, answer},
    settled,
};
use bytes::Bytes;
use http_body_util::{BodyExt, Full};
use hyper_util::{
    client::legacy::{Client, connect::HttpConnector},
    rt::TokioExecutor,
};
use tokio::time::{Instant, sleep};
use tower::{Service, ServiceBuilder, ServiceExt};
use tower_herd::{
    AttemptTimeoutLayer, BoxError, ClassifyLayer, JitteredRetryLayer, Refusal, RefusalKind, Safety, Task,
    TaskLayer,
};

type Request = http::Request<Full<Bytes>>;

fn client(http2: bool) -> Client<HttpConnector, Full<Bytes>> {
    let mut connector = HttpConnector::new();
    connector.set_nodelay(true);
    Client::builder(TokioExecutor::new()).http2_only(http2).build(connector)
}

/// An unkeyed write: sent again only on proof that it was not executed.
fn post(url: &str) -> Request {
    http::Request::post(url).body(Full::from("{}")).unwrap()
}

fn retry() -> JitteredRetryLayer {
    JitteredRetryLayer::new().base(ms(20))
}

/// One whole call: the status, and the body.
async fn whole<S, B>(service: S, request: Request) -> Result<(u16, Bytes), BoxError>
where
    S: Service<Request, Response = http::Response<B>, Error: Into<BoxError>>,
    B: http_body::Body<Error: Into<BoxError>>,
{
    let (head, body) = service.oneshot(request).await.map_err(Into::into)?.into_parts();
    Ok((head.status.as_u16(), body.collect().await.map_err(Into::into)?.to_bytes()))
}

/// An instant as servers write it, this many seconds after a fixed one.
fn date(seconds: u32) -> String {
    format!("Tue, 14 Nov 2023 22:13:{seconds:02} GMT")
}

// The server's clock is the judge: no call reaches it before the wait that it asked for is over.
#[tokio::test]
async fn a_wait_is_kept_in_every_way_of_saying_it() {
    let dialects: [(&str, Vec<(&'static str, String)>); 3] = [
        ("seconds", vec![("retry-after", "1".to_owned())]),
        ("milliseconds", vec![("retry-after-ms", "1000".to_owned())]),
        // By the reply's own clock, which is years behind ours.
        ("a date", vec![("date", date(20)), ("retry-after", date(21))]),
    ];
    let kinds = dialects.iter().flat_map(|dialect| [(dialect, false), (dialect, true)]);
    let stampedes = kinds.map(|((name, headers), http2)| async move {
        let headers = headers.clone();
        let server = Server::start(move |n, _| {
            let refused = headers.iter().fold(answer(429), |a, (name, value)| a.header(name, value));
            if n == 0 { refused } else { answer(200) }
        })
        .await;
        let p = provider("p", 8);
        let service = ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(retry())
            .layer(gates!(&p))
            .service(client(http2));
        let first = tokio::spawn(whole(service.clone(), post(&server.url)));
        while p.throttled() == 0 {
            sleep(ms(1)).await;
        }
        // Who comes meanwhile knows it from the first.
        let others = (0..5).map(|_| tokio::spawn(whole(service.clone(), post(&server.url))));
        for call in others.chain([first]).collect::<Vec<_>>() {
            assert_eq!(call.await.unwrap().unwrap().0, 200, "{name}: nothing was executed");
        }
        let gaps = gaps(&server.counts.times());
        assert_eq!(gaps.len(), 6, "{name}, http2 {http2}");
        assert!(gaps.iter().all(|gap| (secs(1)..secs(6)).contains(gap)), "{name}, http2 {http2}: {gaps:?}");
    });
    futures_util::future::join_all(stampedes).await;
}

#[tokio::test]
async fn a_body_holds_its_slot_to_its_end_over_both_versions_of_http() {
    for http2 in [false, true] {
        let server = Server::start(|_, _| answer(200).parts(4, ms(60))).await;
        let p = provider("p", 1);
        let service = ServiceBuilder::new().layer(gates!(&p)).service(client(http2));
        let reply = service.clone().oneshot(post(&server.url)).await.unwrap();
        let second = tokio::spawn(whole(service, post(&server.url)));
        sleep(ms(60)).await;
        assert_eq!((p.in_flight(), p.waiting(), server.counts.calls()), (1, 1, 1), "http2 {http2}");
        assert_eq!(reply.into_body().collect().await.unwrap().to_bytes(), "okokokok");
        assert_eq!(second.await.unwrap().unwrap().1, "okokokok");
        assert_eq!((p.in_flight(), server.counts.peak()), (0, 1), "http2 {http2}");
    }
}

#[tokio::test]
async fn a_write_is_sent_again_when_its_connection_was_refused() {
    for http2 in [false, true] {
        let (socket, url) = refusing();
        let p = provider("p", 8);
        let service = ServiceBuilder::new()
            .layer(TaskLayer::new())
            .layer(JitteredRetryLayer::new().base(ms(400)).attempts(8).budget(tower_herd::retry::Unlimited))
            .layer(gates!(&p))
            .service(client(http2));
        let mut request = post(&url);
        request.extensions_mut().insert(Task::new("it").allowance(8).deadline_in(secs(30)));
        let call = tokio::spawn(whole(service, request));
        sleep(ms(150)).await;
        let server = Server::on(socket.listen(64).unwrap(), |_, _| answer(200));
        assert_eq!(call.await.unwrap().unwrap().0, 200);
        assert_eq!(server.counts.calls(), 1, "executed once");
        settled(&p).await;
    }
}

#[tokio::test]
async fn a_write_whose_connection_broke_after_it_was_sent_is_not() {
    let server = Server::start(|_, _| answer(200).parts(1, ms(0)).breaks()).await;
    let p = provider("p", 8);
    let service =
        ServiceBuilder::new().layer(TaskLayer::new()).layer(retry()).layer(gates!(&p)).service(client(false));
    // Whether it was executed nobody knows.
    assert!(whole(service, post(&server.url)).await.is_err());
    assert_eq!(server.counts.calls(), 1);
    assert_eq!(p.in_flight(), 0);
}

#[tokio::test]
async fn a_silent_attempt_is_cut_and_the_next_one_answers() {
    let server = Server::start(|n, _| if n == 0 { answer(200).after(secs(20)) } else { answer(200) }).await;
    let p = provider("p", 8);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new())
        .layer(retry())
        .layer(ClassifyLayer::new(&p))
        .layer(AttemptTimeoutLayer::new(ms(200)))
        .service(client(false));
    for (safety, calls, ok) in [(Safety::Safe, 2, true), (Safety::Once, 3, true)] {
        let mut request = post(&server.url);
        request.extensions_mut().insert(safety);
        let start = Instant::now();
        assert_eq!(whole(service.clone(), request).await.is_ok(), ok);
        assert!(start.elapsed() < secs(5));
        assert_eq!(server.counts.calls(), calls);
    }
}

#[tokio::test]
async fn a_pause_that_outlasts_the_deadline_is_refused_and_nothing_is_sent() {
    let server = Server::start(|_, _| answer(429).header("retry-after", 30)).await;
    let p = provider("p", 8);
    let service = ServiceBuilder::new()
        .layer(TaskLayer::new().deadline(secs(5)))
        .layer(gates!(&p))
        .service(client(true));
    assert_eq!(whole(service.clone(), post(&server.url)).await.unwrap().0, 429);
    let start = Instant::now();
    let error = whole(service, post(&server.url)).await.unwrap_err();
    let refusal = Refusal::find(&*error).unwrap();
    assert_eq!(refusal.kind, RefusalKind::Paused);
    assert!(refusal.wait().unwrap() > secs(25) && start.elapsed() < secs(2));
    assert_eq!(server.counts.calls(), 1);
}
