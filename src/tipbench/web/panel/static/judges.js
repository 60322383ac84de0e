// A sheet that was just made is handed out at once; a reload of the page does not do it again.
const link = document.querySelector("#made a.primary");
if (link) {
  history.replaceState(null, "", location.pathname);
  link.click();
}
