//! stub
/// r
pub trait Resend<Req> {
    /// k
    type Kept;
    /// k
    fn keep(&self, request: &mut Req) -> Option<Self::Kept>;
    /// k
    fn again(&self, kept: &mut Self::Kept) -> Option<Req>;
}
/// c
#[derive(Clone, Copy, Default, Debug)]
pub struct CloneRequest;
impl<Req: Clone> Resend<Req> for CloneRequest {
    type Kept = Req;
    fn keep(&self, req: &mut Req) -> Option<Req> { Some(req.clone()) }
    fn again(&self, k: &mut Req) -> Option<Req> { Some(k.clone()) }
}
