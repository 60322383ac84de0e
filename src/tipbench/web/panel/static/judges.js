// Downloads a new sheet at once. The URL is replaced, so that a reload does not download it again.
const link = document.querySelector("#made a.primary");
if (link) {
  history.replaceState(null, "", location.pathname);
  link.click();
}
