//! Conversions that keep what reqwest's own lose.

use bytes::Bytes;
use http::Extensions;
use http_body::Body as _;
use reqwest::{Body, ResponseBuilderExt, Url};
use std::{
    any::Any,
    pin::Pin,
    task::{Context, Poll, Waker},
};
use tower_herd::BoxError;

/// Says that a response carries its URL, under a type of reqwest that has no public name.
#[derive(Clone, Copy)]
struct HasUrl;

/// A response of reqwest as one of http types, with its URL (reqwest's `From` drops it).
///
/// The URL travels as an extension, where reqwest's `From<http::Response<_>>` and
/// [`IntoReqwest`] find it again.
#[must_use]
pub fn into_http(response: reqwest::Response) -> http::Response<Body> {
    let tag = url_extension(response.url().clone());
    let mut response: http::Response<Body> = response.into();
    response.extensions_mut().extend(tag);
    response
}

fn url_extension(url: Url) -> Extensions {
    let tagged = http::Response::builder().url(url).extension(HasUrl).body(());
    tagged.expect("a head without headers is valid").into_parts().0.extensions
}

/// A response of http types, of any body, as one of reqwest.
///
/// A trait because the layers of a stack choose the body's type: the bound of
/// [`TowerMiddleware`](crate::TowerMiddleware) names this trait, since it cannot name the type.
///
/// ```
/// use tower_herd_reqwest::IntoReqwest;
///
/// let made_up = http::Response::builder().status(503).body(reqwest::Body::from("later"))?;
/// assert_eq!(made_up.into_reqwest().status(), 503);
/// # Ok::<(), http::Error>(())
/// ```
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot become a `reqwest::Response`",
    label = "the response of this stack",
    note = "it must be an `http::Response<B>` with `B: http_body::Body + Send + Sync + 'static`, whose data turns into `bytes::Bytes`"
)]
pub trait IntoReqwest {
    /// The response, with the URL it was fetched from if it came from reqwest. One that a layer made
    /// up has none; reqwest then answers `http://no.url.provided.local`.
    fn into_reqwest(self) -> reqwest::Response;

    /// The same; a response that a layer made up gets this URL.
    fn into_reqwest_from(self, url: &Url) -> reqwest::Response;
}

impl<B> IntoReqwest for http::Response<B>
where
    B: http_body::Body + Send + Sync + 'static,
    B::Data: Into<Bytes>,
    B::Error: Into<BoxError>,
{
    fn into_reqwest(mut self) -> reqwest::Response {
        self.extensions_mut().remove::<HasUrl>();
        self.map(wrap).into()
    }

    fn into_reqwest_from(mut self, url: &Url) -> reqwest::Response {
        if self.extensions().get::<HasUrl>().is_none() {
            self.extensions_mut().extend(url_extension(url.clone()));
        }
        self.into_reqwest()
    }
}

/// `Body::wrap`, but a body that is reqwest's already is not boxed again.
fn wrap<B>(body: B) -> Body
where
    B: http_body::Body + Send + Sync + 'static,
    B::Data: Into<Bytes>,
    B::Error: Into<BoxError>,
{
    let mut body = Some(body);
    if let Some(same) = (&mut body as &mut dyn Any).downcast_mut::<Option<Body>>() {
        return same.take().expect("put there above");
    }
    Body::wrap(body.expect("not taken above"))
}

/// A second handle of a reusable body (made from bytes or text), for code that sends a request again;
/// `None` for a stream.
///
/// No bytes are copied, and both stay reusable: reqwest can still follow a 307 or 308 with them.
///
/// ```
/// let mut body = reqwest::Body::from("again and again");
/// let copy = tower_herd_reqwest::clone_body(&mut body).expect("not a stream");
/// assert_eq!(copy.as_bytes(), body.as_bytes());
/// ```
#[must_use]
pub fn clone_body(body: &mut Body) -> Option<Body> {
    body.as_bytes()?;
    // The only way to the handle behind `as_bytes`: a reusable body is one frame, and always ready.
    let mut taken = std::mem::take(body);
    let bytes = match Pin::new(&mut taken).poll_frame(&mut Context::from_waker(Waker::noop())) {
        Poll::Ready(Some(Ok(frame))) => frame.into_data().unwrap_or_default(),
        _ => Bytes::new(),
    };
    *body = bytes.clone().into();
    Some(bytes.into())
}

/// A second request like this one, if its body is reusable: see [`clone_body`].
///
/// Extensions are cloned too, so a task, a safety, and the chain's own entries go along.
#[must_use]
pub fn clone_request(request: &mut http::Request<Body>) -> Option<http::Request<Body>> {
    let mut copy = http::Request::new(clone_body(request.body_mut())?);
    *copy.method_mut() = request.method().clone();
    *copy.uri_mut() = request.uri().clone();
    *copy.version_mut() = request.version();
    *copy.headers_mut() = request.headers().clone();
    *copy.extensions_mut() = request.extensions().clone();
    Some(copy)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http_body_util::Full;

    #[test]
    fn the_url_goes_there_and_back() {
        let url: Url = "http://llm.example/v1?a=b".parse().unwrap();
        let response: reqwest::Response = http::Response::builder().url(url.clone()).body("").unwrap().into();
        let back = into_http(response).map(|_| Full::new(Bytes::from_static(b"other type"))).into_reqwest();
        assert_eq!(back.url(), &url);
        assert!(back.extensions().get::<HasUrl>().is_none(), "our mark stays inside");

        let other: Url = "http://other.example/".parse().unwrap();
        assert_eq!(into_http(back).into_reqwest_from(&other).url(), &url, "its own URL wins");
        let made_up = http::Response::new(Body::default());
        assert_eq!(made_up.into_reqwest_from(&other).url(), &other);
    }

    #[test]
    fn reusable_bodies_are_shared_and_streams_refused() {
        let bytes = Bytes::from(vec![7; 1000]);
        let mut body = Body::from(bytes.clone());
        let copy = clone_body(&mut body).unwrap();
        for body in [&body, &copy] {
            assert_eq!(body.as_bytes().unwrap().as_ptr(), bytes.as_ptr(), "not copied");
        }
        assert_eq!(clone_body(&mut Body::default()).unwrap().as_bytes(), Some(&b""[..]));
        let mut stream = Body::wrap(Full::new(bytes));
        assert!(clone_body(&mut stream).is_none());
        assert_eq!(stream.size_hint().exact(), Some(1000), "and left alone");
    }

    #[test]
    fn a_body_of_reqwest_is_not_boxed_again() {
        assert!(wrap(Body::from("x")).as_bytes().is_some());
        assert!(wrap(String::from("x")).as_bytes().is_none());
    }
}
